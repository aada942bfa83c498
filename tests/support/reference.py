"""What the server must compute, done by others: transformers for the model, PEFT for LoRA, torch.optim.AdamW.

Nothing of ours is imported: the formulas are written down anew, in the plainest way. Beside it a small client that
speaks JSON and hands the numbers over as tensors, and measures of distance. Not responsible for the bounds: tests
set them.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load
from torch import Tensor
from transformers import AutoModelForCausalLM

Example = dict[str, Tensor]
"""`tokens` [N] and the inputs of the loss."""
Adapter = dict[str, Tensor]
"""Tensors by their PEFT names."""


class Reference:
    """A PEFT model with the adapter of an export, trained by hand; `options` are those of `from_pretrained`."""

    def __init__(
        self, folder: Path, config: dict[str, Any], adapter: Adapter, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        modules = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapter})
        lora = LoraConfig(r=config["r"], lora_alpha=32, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM")
        self.model = get_peft_model(base, lora).eval().to(dtype)
        trained = {name.replace(".default", ""): p for name, p in self.model.named_parameters() if p.requires_grad}
        assert set(trained) == set(adapter)
        self.parameters = trained
        self.put(adapter)
        self.optimizer = torch.optim.AdamW(trained.values(), foreach=False)

    def put(self, adapter: Adapter) -> None:
        """Continue from these weights."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(adapter[name])

    def get(self) -> Adapter:
        """The present weights."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def log_softmax(self, tokens: Sequence[int] | Tensor, temperature: float = 1.0) -> Tensor:
        """Of the next token after each position, [N, vocabulary]."""
        logits = self.model(input_ids=torch.as_tensor(tokens)[None]).logits[0]
        return torch.log_softmax(logits / temperature, -1)

    def logprobs(self, example: Example) -> Tensor:
        """Of the targets, in their shape."""
        targets = example["target_tokens"]
        columns = targets if targets.ndim == 2 else targets[:, None]
        return self.log_softmax(example["tokens"]).gather(1, columns).reshape(targets.shape)

    def forward_backward(self, data: list[Example], loss: str, config: dict[str, float] | None = None) -> list[Tensor]:
        """Add the gradient of the loss; the logprobs it was computed at."""
        given = []
        for example in data:
            lp = self.logprobs(example)
            loss_of(loss, lp, example, config or {}).backward()
            given.append(lp.detach())
        return given

    def gradient(self) -> Adapter:
        """What was added up, which is forgotten."""
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.optimizer.zero_grad()
        return found

    def step(self, **adam: Any) -> None:
        """AdamW with these hyperparameters."""
        self.optimizer.param_groups[0].update(adam)
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_of(name: str, lp: Tensor, x: Example, config: dict[str, float], at: Tensor | None = None) -> Tensor:
    """The number that is minimised, for one example.

    Where a formula stops the gradient, its argument is `at` (None: `lp` itself), so that with a fixed `at` the plain
    slope of this function is the gradient of the loss.
    """
    at = (lp if at is None else at).detach()
    if name == "cross_entropy":
        return -(x.get("weights", torch.ones_like(lp)) * lp).sum()
    q, a = x["logprobs"], x["advantages"]
    r = torch.exp(lp - q)
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "dro":
        return -(lp * a - config.get("beta", 0.05) / 2 * (lp - q) ** 2).sum()
    if name == "stable_reinforce":
        sampled = (a != 0) | (q != 0)
        pull = torch.nn.functional.huber_loss(lp[sampled], q[sampled], reduction="sum")
        return config.get("kl_coeff", 0.0) * pull - (torch.exp(at - q).clamp(max=2.0) * lp * a).sum()
    bounds = {"cispo": (0.0, 4.0), "ppo": (0.8, 1.2), "gspo": (1 - 3e-4, 1 + 4e-4)}[name]
    low, high = (
        torch.as_tensor(x.get(key, config.get(key, bound)), dtype=lp.dtype).expand_as(lp)
        for key, bound in zip(("clip_low_threshold", "clip_high_threshold"), bounds, strict=True)
    )
    if name == "cispo":
        return -(torch.exp(at - q).clamp(low, high) * lp * a).sum()
    if name == "gspo":
        s = torch.exp((at - q)[x["sequence_ratio_mask"] != 0].mean())
        r = s * torch.exp(lp - at)
    return -torch.minimum(r * a, r.clamp(low, high) * a).sum()


@dataclass
class Client:
    """One session over HTTP."""

    http: httpx.Client
    session: str = ""
    counter: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "reference"}
        self.session = self.post("create_session", **body)["session_id"]

    def post(self, route: str, /, **body: Any) -> Any:
        """The answer to one POST, which must be good."""
        answer = self.http.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def do(self, route: str, /, **body: Any) -> Any:
        """Submit and wait for the result."""
        request = {"request_id": self.post(route, **body)["request_id"]}
        while (answer := self.http.post("retrieve_future", json=request)).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.json(), answer.text
        return answer.json()

    def model(self, base_model: str, **lora: Any) -> Model:
        """A fresh adapter."""
        number = next(self.counter)
        made = self.do(
            "create_model", session_id=self.session, model_seq_id=number, base_model=base_model, lora_config=lora
        )
        return Model(self, made["model_id"])

    def sample(self, sampler: str, prompt: list[int], *, samples: int = 1, **options: Any) -> Any:
        """Continuations of a prompt; what `asample` knows by name goes there, the rest is a sampling parameter."""
        beside = {name: options.pop(name) for name in list(options) if "logprobs" in name}
        return self.do(
            "asample",
            sampling_session_id=sampler,
            prompt=prompt,
            num_samples=samples,
            sampling_params=options,
            **beside,
        )


@dataclass
class Model:
    """A training run."""

    client: Client
    model_id: str
    counter: itertools.count[int] = field(default_factory=itertools.count)

    def do(self, route: str, /, **body: Any) -> Any:
        """An operation of this model."""
        return self.client.do(route, model_id=self.model_id, **body)

    def forward_backward(
        self, data: list[Example], loss: str, config: dict[str, float] | None = None
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Logprobs and metrics."""
        outcome = self.do("forward_backward", data=[as_json(x) for x in data], loss_fn=loss, loss_fn_config=config)
        return [
            torch.tensor(each["logprobs"]["data"]).reshape(each["logprobs"]["shape"])
            for each in outcome["loss_fn_outputs"]
        ], outcome["metrics"]

    def step(self, **adam: Any) -> dict[str, float]:
        """The metrics of an optimizer step."""
        metrics: dict[str, float] = self.do("optim_step", adam_params=adam)["metrics"]
        return metrics

    def probe(self, size: float = 1e-3) -> tuple[Adapter, Adapter]:
        """The accumulated gradient, read off the adapter before and after a step, and the adapter after it.

        With beta1 = beta2 = 0 and eps = 1 the first step of AdamW moves by size * g / (|g| + 1), which is solved for g.
        """
        before = self.export()[1]
        self.step(learning_rate=size, beta1=0.0, beta2=0.0, eps=1.0)
        after = self.export()[1]
        moved = {name: (before[name].double() - after[name].double()) / size for name in before}
        return {name: m / (1 - m.abs()) for name, m in moved.items()}, after

    def export(self) -> tuple[dict[str, Any], Adapter]:
        """`adapter_config.json` and the tensors, downloaded."""
        name = f"export-{next(self.counter)}"
        self.do("save_weights_external", path=name)
        route = f"training_runs/{self.model_id}/checkpoints/external_weights/{name}/external_weights_urls"
        urls = self.client.http.get(route).json()["urls"]
        files = {file: httpx.get(url, timeout=60).content for file, url in urls.items()}
        return json.loads(files["adapter_config.json"]), load(files["adapter_model.safetensors"])

    def sampler(self) -> str:
        """A sampling session on the present weights."""
        outcome = self.do("save_weights_for_sampler", sampling_session_seq_id=next(self.client.counter))
        return str(outcome["sampling_session_id"])


def as_json(example: Example) -> dict[str, Any]:
    """The datum as a JSON client writes it."""
    inputs = {name: value.tolist() for name, value in example.items() if name != "tokens"}
    return {"model_input": example["tokens"].tolist(), "loss_fn_inputs": inputs}


def tell(what: str, measured: float, bound: float) -> None:
    """Hold a bound, and show what was measured (pytest shows it with `-s`)."""
    sys.stdout.write(f"\n{what:<60} {measured:.1e}   (bound {bound:.0e})")
    assert measured <= bound, what


def furthest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest absolute difference."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


def relative(ours: Adapter, theirs: Adapter) -> float:
    """The 2-norm of the difference over the 2-norm, of all tensors together."""
    assert set(ours) == set(theirs)
    off = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    return math.sqrt(off / sum(float(each.double().square().sum()) for each in theirs.values()))
