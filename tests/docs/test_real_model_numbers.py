"""The numbers of docs/numerics.md on the real default model: a server process against transformers, PEFT and torch.

`pytest tests/docs/test_real_model_numbers.py -s` prints what was measured. The bounds are the page's; what a broken
formula, a wrong scale or a lost position gives is thousands of times larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.support.reference import Adapter, Client, Example, Model, Reference, furthest, relative, tell
from tests.support.server import RunningServer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXTS = ("The capital of France is Paris, on the river Seine.", "A tinsmith bends sheets of tin into lamps.")
LOGPROBS = 4e-5
"""On one machine the server is within 1.5e-5; two attention kernels of torch already differ by 2.3e-5 here, and so may
two processors."""
ADAM = {"eps": 1e-8, "weight_decay": 0.01}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """For the reference: the server has the cores, and threads that wait for each other are slow beside it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def client(real_server: RunningServer) -> Iterator[Client]:
    with real_server.client() as http:
        yield Client(http)


@pytest.fixture(scope="module")
def folder(real_server: RunningServer) -> Path:
    return next((real_server.data_dir / "base_models").glob("*/config.json")).parent


@pytest.fixture(scope="module")
def data(folder: Path) -> list[Example]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    return [{"tokens": each[:-1], "target_tokens": each[1:]} for each in tokens]


@pytest.fixture(scope="module")
def model(client: Client) -> Model:
    return client.model(MODEL, rank=4, seed=7)


@pytest.fixture(scope="module")
def reference(folder: Path, model: Model, data: list[Example]) -> Reference:
    """From the adapter as it is after one large step, so that B is not zero and A has a gradient."""
    model.forward_backward(data, "cross_entropy")
    model.step(learning_rate=2e-3)
    return Reference(folder, *model.export())


def inputs_of(loss: str, example: Example, lp: Tensor, random: torch.Generator) -> Example:
    """The example with what the loss reads; half of the ratios lie beyond the usual clip bounds."""
    if loss == "cross_entropy [N, K]":
        targets = torch.stack([example["target_tokens"], example["tokens"]], 1)
        return {**example, "target_tokens": targets, "weights": torch.randn(targets.shape, generator=random)}
    if loss == "cross_entropy":
        return example
    spread = 1e-3 if loss == "gspo" else 0.3
    policy = {
        "logprobs": lp + spread * torch.randn(lp.shape, generator=random),
        "advantages": torch.randn(lp.shape, generator=random),
    }
    if loss == "gspo":
        policy["sequence_ratio_mask"] = (torch.arange(len(lp)) % 4 != 0).float()
    return {**example, **policy}


CONFIGURATIONS = {"cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.1}, "dro": {"beta": 0.5}}
LOSSES = ("cross_entropy", "cross_entropy [N, K]", "importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.mark.parametrize("loss", LOSSES)
def test_logprobs_and_gradient(loss: str, model: Model, reference: Reference, data: list[Example]) -> None:
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        examples = [inputs_of(loss, x, reference.logprobs(x), random) for x in data]
    name, config = loss.split()[0], CONFIGURATIONS.get(loss)
    ours, _ = model.forward_backward(examples, name, config)
    theirs = reference.forward_backward(examples, name, config)
    expected = reference.gradient()
    gradient, after = model.probe()
    reference.put(after)
    tell(f"{loss}: logprobs", furthest(ours, theirs), LOGPROBS)
    tell(f"{loss}: gradient, relative", relative(gradient, expected), 1e-4)


def test_five_steps_of_adamw(client: Client, folder: Path, data: list[Example], reference: Reference) -> None:
    """Of 1.4 million numbers some have a gradient below the rounding of float32, and Adam with eps 1e-8 moves those by
    a whole learning rate of either sign: a share of the adapter is bounded, not its largest element."""
    model = client.model(MODEL, rank=4, seed=8)
    before = model.export()[1]
    reference.put(before)
    for rate in (1e-4, 5e-4, 1e-4, 2e-4, 1e-4):
        model.forward_backward(data, "cross_entropy")
        norm = model.step(learning_rate=rate, **ADAM)["grad_norm"]
        reference.forward_backward(data, "cross_entropy")
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters.values(), float("inf"))
        reference.step(lr=rate, betas=(0.9, 0.95), **ADAM)
        assert norm == pytest.approx(float(expected), rel=1e-4)
    after, expected_after = model.export()[1], reference.get()
    ours, _ = model.forward_backward(data, "cross_entropy")
    with torch.no_grad():
        theirs = [reference.logprobs(x) for x in data]
    tell("five steps: logprobs", furthest(ours, theirs), 1e-3)
    tell("five steps: share of the adapter off by more than 1e-5", share_off(after, expected_after), 1e-3)
    tell("five steps: distance over distance moved", travelled(after, expected_after, before), 1e-2)


def share_off(ours: Adapter, theirs: Adapter) -> float:
    off = torch.cat([((ours[name] - theirs[name]).abs() > 1e-5).flatten() for name in theirs])
    return float(off.double().mean())


def travelled(ours: Adapter, theirs: Adapter, start: Adapter) -> float:
    moved = {name: theirs[name] - start[name] for name in theirs}
    return relative({name: ours[name] - start[name] for name in theirs}, moved)


@pytest.fixture(scope="module")
def sampler(model: Model, reference: Reference) -> str:
    reference.put(model.export()[1])
    return model.sampler()


def test_prompt_logprobs(client: Client, sampler: str, reference: Reference, data: list[Example]) -> None:
    tokens = data[1]["tokens"].tolist()
    answer = client.sample(sampler, tokens, max_tokens=1, temperature=0.5, prompt_logprobs=True, topk_prompt_logprobs=3)
    with torch.no_grad():
        expected = reference.log_softmax(tokens)[:-1]
    assert answer["prompt_logprobs"][0] is None
    scores = torch.tensor(answer["prompt_logprobs"][1:])
    tell("prompt logprobs", furthest([scores], [picked(expected, tokens[1:])]), LOGPROBS)
    best = torch.tensor([[pair[1] for pair in row] for row in answer["topk_prompt_logprobs"][1:]])
    tell("topk prompt logprobs", furthest([best], [expected.topk(3).values]), LOGPROBS)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9}],
    ids=["T=1", "T=0.5", "T=1.5, top_k 20, top_p 0.9"],
)
def test_sampled_logprobs(
    params: dict[str, Any], client: Client, sampler: str, reference: Reference, data: list[Example]
) -> None:
    prompt = data[0]["tokens"].tolist()
    answer = client.sample(sampler, prompt, samples=2, max_tokens=12, seed=5, stop=[], **params)
    drawn = [each["tokens"] for each in answer["sequences"]]
    assert drawn[0] != drawn[1]
    for sequence in answer["sequences"]:
        tokens = sequence["tokens"]
        with torch.no_grad():
            table = reference.log_softmax(prompt + tokens, params["temperature"])[len(prompt) - 1 : -1]
        bound = LOGPROBS * max(1.0, 1 / params["temperature"])
        tell(f"sampled, {params}", furthest([torch.tensor(sequence["logprobs"])], [picked(table, tokens)]), bound)
        if "top_k" in params:
            assert all(token in nucleus(row, 20, 0.9) for row, token in zip(table, tokens, strict=True))
    again = client.sample(sampler, prompt, samples=1, max_tokens=12, seed=5, stop=[], **params)
    assert again["sequences"][0]["tokens"] == drawn[0]


def picked(table: Tensor, tokens: list[int]) -> Tensor:
    """One column per row."""
    return table.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def nucleus(row: Tensor, k: int, p: float) -> list[int]:
    """First the k likeliest, then, of those renormalised, the fewest that hold the mass p."""
    best = row.topk(k)
    mass = torch.softmax(best.values, 0)
    kept: list[int] = best.indices[mass.cumsum(0) - mass < p].tolist()
    return kept


def test_greedy_is_what_transformers_generates(
    client: Client, sampler: str, reference: Reference, data: list[Example]
) -> None:
    prompt = data[0]["tokens"][:6]
    answer = client.sample(sampler, prompt.tolist(), max_tokens=16, temperature=0)["sequences"][0]
    generated = reference.model.generate(
        input_ids=prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=16, do_sample=False
    )
    assert answer["tokens"] == generated[0, len(prompt) :].tolist()
    with torch.no_grad():
        table = reference.log_softmax(prompt.tolist() + answer["tokens"])[len(prompt) - 1 : -1]
    tell(
        "greedy, logprobs at temperature 1",
        furthest([torch.tensor(answer["logprobs"])], [picked(table, answer["tokens"])]),
        LOGPROBS,
    )


def test_the_sdk_reads_the_longer_info(real_server: RunningServer, model: Model) -> None:
    import tinker

    with tinker.ServiceClient(base_url=real_server.url, api_key=real_server.key) as service:
        info = service.create_lora_training_client(base_model=MODEL, rank=4, seed=7).result().get_info()
    assert (info.lora_rank, info.model_data.model_name) == (4, MODEL)
    told = model.client.post("get_info", model_id=model.model_id)
    assert (told["lora_alpha"], told["lora_seed"], told["train_unembed"]) == (32, 7, True)
