"""A user's script, with whatever version of the SDK is installed: `python smoke_client.py URL KEY BASE_MODEL`.

Responsible for walking through the public interface step by step and telling, as one line of JSON, which version it was
and how each step ended. Not responsible for installing a version or starting a server (`tests/compat/versions.py`), and
it imports nothing of this project, because it also runs where only the SDK is installed.

A step that a version has no method for is reported as absent, which is not a failure.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

warnings.simplefilter("ignore")

import tinker  # noqa: E402 (the warnings of its import are of no interest)
import torch  # noqa: E402
from tinker import types  # noqa: E402

TOKENS = ([5, 6, 7, 8, 9], [20, 21, 22])
STEP_SECONDS = 60


class Absent(Exception):
    """This version of the SDK has no such method."""


def waited(value: Any) -> Any:
    """The value itself, or what a future of it holds: methods that used to block return futures since 0.37."""
    return value.result(STEP_SECONDS) if hasattr(value, "result") else value


def method(owner: Any, name: str) -> Callable[..., Any]:
    """A method of an SDK object, or Absent."""
    found = getattr(owner, name, None)
    if found is None:
        raise Absent(f"{type(owner).__name__}.{name}")
    return found  # type: ignore[no-any-return]


def example(tokens: list[int]) -> Any:
    """Each token predicts the next."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
            "weights": types.TensorData.from_torch(torch.ones(len(tokens) - 1)),
        },
    )


def scores(output: Any) -> list[list[float]]:
    """The logprobs of each datum, checked for shape."""
    found = [list(each["logprobs"].data) for each in output.loss_fn_outputs]
    assert [len(each) for each in found] == [len(tokens) - 1 for tokens in TOKENS], found
    assert all(math.isfinite(value) and value <= 0 for each in found for value in each), found
    return found


def close_to(found: list[float], wanted: list[float]) -> None:
    """Fails unless two lists agree within 1e-3."""
    assert len(found) == len(wanted), (found, wanted)
    assert all(abs(a - b) < 1e-3 for a, b in zip(found, wanted, strict=True)), (found, wanted)


class Walk:
    """One session of training and sampling. Every public method is a step; later steps use what earlier ones left."""

    def __init__(self, url: str, key: str, base_model: str) -> None:
        self.url, self.key, self.base_model = url, key, base_model
        self.data = [example(tokens) for tokens in TOKENS]

    def connect(self) -> None:
        self.service = tinker.ServiceClient(base_url=self.url, api_key=self.key)
        served = [each.model_name for each in waited(self.service.get_server_capabilities()).supported_models]
        assert self.base_model in served, served

    def create_model(self) -> None:
        self.client = waited(self.service.create_lora_training_client(base_model=self.base_model, rank=4, seed=1))

    def get_info(self) -> None:
        info = self.client.get_info()
        assert info.model_data.model_name == self.base_model, info
        assert info.lora_rank == 4, info

    def get_tokenizer(self) -> None:
        tokenizer = self.client.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"

    def forward_backward(self) -> None:
        output = waited(self.client.forward_backward(self.data, "cross_entropy"))
        assert math.isclose(output.metrics["loss:sum"], -sum(map(sum, scores(output))), rel_tol=1e-4), output.metrics
        self.before = scores(output)

    def optim_step(self) -> None:
        waited(self.client.optim_step(types.AdamParams(learning_rate=1e-2)))

    def forward(self) -> None:
        self.after = scores(waited(self.client.forward(self.data, "cross_entropy")))
        assert sum(map(sum, self.after)) > sum(map(sum, self.before)), (self.before, self.after)

    def forward_backward_custom(self) -> None:
        def negated(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            return -sum(each.sum() for each in logprobs), {"examples": float(len(data))}

        output = waited(method(self.client, "forward_backward_custom")(self.data, negated))
        assert output.metrics["examples"] == 2.0, output.metrics
        waited(self.client.optim_step(types.AdamParams(learning_rate=1e-2)))
        self.after = scores(waited(self.client.forward(self.data, "cross_entropy")))

    def save_state(self) -> None:
        self.state = waited(self.client.save_state("smoke")).path
        assert self.state.endswith("/weights/smoke"), self.state

    def save_weights_for_sampler(self) -> None:
        self.weights = waited(self.client.save_weights_for_sampler("smoke")).path
        assert self.weights.endswith("/sampler_weights/smoke"), self.weights

    def create_sampling_client(self) -> None:
        self.named = waited(self.service.create_sampling_client(model_path=self.weights))
        self.base = waited(self.service.create_sampling_client(base_model=self.base_model))

    def save_weights_and_get_sampling_client(self) -> None:
        self.sampler = waited(self.client.save_weights_and_get_sampling_client())

    def sample(self) -> None:
        params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
        prompt = types.ModelInput.from_ints([5, 6])
        for sampler in (self.named, self.sampler, self.base):
            result = waited(sampler.sample(prompt, num_samples=2, sampling_params=params))
            assert [len(each.tokens) for each in result.sequences] == [3, 3], result
            assert [len(each.logprobs) for each in result.sequences] == [3, 3], result
            assert {each.stop_reason for each in result.sequences} == {"length"}, result

    def sample_with_prompt_logprobs(self) -> None:
        result = waited(
            self.named.sample(
                types.ModelInput.from_ints(TOKENS[0]),
                num_samples=1,
                sampling_params=types.SamplingParams(max_tokens=1),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=2,
            )
        )
        assert result.prompt_logprobs[0] is None
        close_to(list(result.prompt_logprobs[1:]), self.after[0])
        assert [len(each) for each in result.topk_prompt_logprobs[1:]] == [2] * (len(TOKENS[0]) - 1)

    def compute_logprobs(self) -> None:
        found = waited(self.sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS[0])))
        assert found[0] is None, found
        close_to(list(found[1:]), self.after[0])

    def load_state(self) -> None:
        waited(self.client.forward_backward(self.data, "cross_entropy"))
        waited(self.client.optim_step(types.AdamParams(learning_rate=1e-1)))
        waited(self.client.load_state(self.state))
        self._same_as_saved(self.client)
        waited(method(self.client, "load_state_with_optimizer")(self.state))
        self._same_as_saved(self.client)

    def resume(self) -> None:
        self._same_as_saved(waited(self.service.create_training_client_from_state(self.state)))
        resumed = waited(self.service.create_training_client_from_state_with_optimizer(self.state))
        self._same_as_saved(resumed)

    def _same_as_saved(self, client: Any) -> None:
        found = scores(waited(client.forward(self.data, "cross_entropy")))
        for each, wanted in zip(found, self.after, strict=True):
            close_to(each, wanted)

    def list_runs(self) -> None:
        self.rest = self.service.create_rest_client()
        run_id = self.state.removeprefix("tinker://").split("/")[0]
        runs = waited(self.rest.list_training_runs(limit=100)).training_runs
        assert run_id in [run.training_run_id for run in runs], runs
        run = waited(self.rest.get_training_run(run_id))
        assert (run.base_model, run.lora_rank) == (self.base_model, 4), run
        assert run_id in waited(self.rest.get_session(run_id.split(":")[0])).training_run_ids

    def list_checkpoints(self) -> None:
        run_id = self.state.removeprefix("tinker://").split("/")[0]
        paths = {each.tinker_path for each in waited(self.rest.list_checkpoints(run_id)).checkpoints}
        assert paths >= {self.state, self.weights}, paths
        info = waited(self.rest.get_weights_info_by_tinker_path(self.state))
        assert info.base_model == self.base_model, info

    def download_archive(self) -> None:
        url = waited(method(self.rest, "get_checkpoint_archive_url_from_tinker_path")(self.weights)).url
        with urllib.request.urlopen(url, timeout=STEP_SECONDS) as answer:
            assert len(answer.read()) > 1000

    def delete_checkpoint(self) -> None:
        waited(self.rest.delete_checkpoint_from_tinker_path(self.weights))

    def sample_from_a_pickled_client(self) -> None:
        clone = pickle.loads(pickle.dumps(self.sampler))
        found = waited(clone.compute_logprobs(types.ModelInput.from_ints(TOKENS[0])))
        close_to(list(found[1:]), self.after[0])

    def forward_in_chunks(self) -> None:
        many = [example(TOKENS[index % 2][:3]) for index in range(1030)]
        output = waited(self.client.forward(many, "cross_entropy"))
        assert len(output.loss_fn_outputs) == len(many)
        first, last = (list(output.loss_fn_outputs[index]["logprobs"].data) for index in (0, 1028))
        close_to(last, first)

    def a_refused_batch(self) -> None:
        try:
            waited(self.client.forward_backward([example([5, 10**6])], "cross_entropy"))
        except (tinker.BadRequestError, tinker.RequestFailedError) as error:
            refusal = str(error)
        else:
            refusal = "none"
        assert "1000000" in refusal, refusal
        waited(self.client.forward_backward(self.data, "cross_entropy"))

    def close(self) -> None:
        waited(method(self.service, "close")("success"))


STEPS = [name for name in vars(Walk) if not name.startswith("_")]


def main(url: str, key: str, base_model: str) -> int:
    """Run every step, print `{"version", "seconds", "steps": {name: "ok" | "absent" | message}}`; 1 if one failed."""
    walk, outcome, started = Walk(url, key, base_model), {}, time.monotonic()
    for name in STEPS:
        try:
            getattr(walk, name)()
            outcome[name] = "ok"
        except Absent:
            outcome[name] = "absent"
        except Exception as error:
            outcome[name] = f"{type(error).__name__}: {error}"[:500]
    report = {"version": version("tinker"), "seconds": round(time.monotonic() - started, 1), "steps": outcome}
    sys.stdout.write(json.dumps(report) + "\n")
    return int(any(text not in ("ok", "absent") for text in outcome.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
