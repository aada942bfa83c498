"""Every engine on GPUs: the common contract in float32, gradients against Hugging Face and PEFT, and ranks over NCCL.

Run it in the environment of the engine that is meant, as `make test-engines` does for the CPU; engines whose library
is not there are skipped with their own reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.base import BaseEngine
from engines.registry import ENGINES, capabilities, get_engine
from schemas.errors import Unavailable
from tests.engines.batches import make_batch
from tests.engines.contract import FAST, SPEC, EngineContract, accumulate, train
from tests.engines.gang import gang
from tests.engines.test_reference import Reference, export, ours
from tests.support.tiny_model import make_tiny_model

SEVERAL = [name for name in ENGINES if capabilities(name).several_ranks]
DEVICE = "cuda"
LARGEST = 2e-4
"""Of the largest gradient: how far gradients of a float32 pass on a GPU may be from those of the CPU."""

pytestmark = pytest.mark.timeout(900)
if not torch.cuda.device_count():
    pytest.skip("engines were NOT tested on a GPU: torch finds no CUDA device", allow_module_level=True)


def available(name: str) -> type[BaseEngine]:
    """The engine's class; skips with the engine's reason where it cannot run."""
    try:
        return get_engine(name)
    except Unavailable as error:
        pytest.skip(f"engine {name} was NOT tested here: {error.message} ({error.hint})")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with an output head of its own."""
    return make_tiny_model(tmp_path_factory.mktemp("gpu") / "tiny", tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """Bounds are those of float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def load(name: str, folder: Path, **options: Any) -> Any:
    made: Any = available(name)
    engine = made(folder, **({"device": DEVICE, "dtype": "float32"} | options))
    engine.load()
    return engine


class TestContract(EngineContract):
    exact = False

    @pytest.fixture(params=sorted(ENGINES))
    def engine(self, request: pytest.FixtureRequest, folder: Path) -> BaseEngine:
        return load(request.param, folder)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_gradients_are_those_of_transformers_and_peft(name: str, folder: Path, tmp_path: Path) -> None:
    engine = load(name, folder)
    engine.create_adapter("a", SPEC)
    train(engine, make_batch("a", seed=3))  # B is not zero any more
    reference = Reference(folder, export(engine, "a", tmp_path / "adapter"))
    batch = make_batch("a", lengths=(5, 17, 40))
    result = accumulate(engine, batch)
    for lp, datum in zip(result.logprobs, batch.datums, strict=True):
        np.testing.assert_allclose(lp, reference.logprobs(datum).detach().numpy(), atol=1e-4)
    reference.loss(batch).backward()  # type: ignore[no-untyped-call]
    expected = {key: parameter.grad for key, parameter in reference.named.items()}
    found = ours(engine, "a", "gradient")
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values() if value is not None)
    for key, value in expected.items():
        assert value is not None, key
        torch.testing.assert_close(found[key].cpu(), value, rtol=0, atol=LARGEST * largest)


@pytest.mark.parametrize("name", ["torch"])
def test_bfloat16_is_close_to_float32(name: str, folder: Path) -> None:
    half, full = load(name, folder, dtype="bfloat16"), load(name, folder)
    batch = make_batch("a", lengths=(5, 17, 40))
    results = []
    for engine in (half, full):
        engine.create_adapter("a", SPEC)
        results.append(np.concatenate([lp.ravel() for lp in engine.forward(batch).logprobs]))
    assert np.abs(results[0] - results[1]).max() < 0.2
    assert np.abs(results[0] - results[1]).mean() < 0.04


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NOT tested: two CUDA devices are needed")
@pytest.mark.parametrize("name", SEVERAL)
def test_two_ranks_over_nccl_are_one(name: str, folder: Path, tmp_path: Path) -> None:
    available(name)
    alone = load(name, folder)
    batch = make_batch("a", lengths=(5, 17, 40, 3))
    options = {"engine": name, "device": DEVICE, "threads": None, "engine_python": sys.executable}
    with gang(folder, tmp_path, 2, **options) as two:
        two.call("create_adapter", "a", SPEC)
        alone.create_adapter("a", SPEC)
        train(alone, batch)
        two.call("forward_backward", batch)
        two.call("optimizer_step", "a", FAST)
        both = two.call("infer_batch", batch)
    for one, other in zip(both.logprobs, alone.forward(batch).logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
