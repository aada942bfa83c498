"""Rows of a product have the bits that they have in any other: the unit that is found here, adapters' products of any
number of rows, and what happens where a machine or a number of threads does not keep them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engines.lora import AdapterWeights, LoraLinear, Router
from engines.machine import is_intel_avx2
from engines.sampling.model_facts import ModelFacts
from engines.sampling.sampling_pass import SamplingPass, Span
from engines.torch_engine import hardware
from engines.torch_engine.assembly import assemble
from engines.torch_engine.invariance import ROW_BLOCK, arrange_rows, choose_rows
from engines.torch_engine.packing import Filling
from tests.support.tiny_model import make_tiny_model

WIDTHS = [(576, 576), (192, 576), (1536, 576), (576, 1536)]
"""Out and in of the default model's linears."""


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_multiple_of_the_unit_has_the_same_bits() -> None:
    weights = [drawn(*shape, seed=i) for i, shape in enumerate(WIDTHS)]
    unit, block = choose_rows(weights, drawn(4096, 576))
    counts = range(unit, 129, unit) if block is None else [block]
    for weight in weights:
        x = drawn(256, weight.shape[1], seed=9)
        whole = torch.mm(x[: len(x) if block is None else block], weight.t())
        for count in counts:
            for start in (0, 3, len(whole) - count):
                if start + count <= len(whole):
                    assert torch.equal(torch.mm(x[start : start + count].clone(), weight.t()), whole[start:][:count])


@pytest.mark.parametrize(("honest", "expected"), [(1, (4, None)), (12, (16, None)), (10**6, (ROW_BLOCK, ROW_BLOCK))])
def test_the_unit_grows_where_few_rows_are_summed_otherwise(
    monkeypatch: pytest.MonkeyPatch, honest: int, expected: tuple[int, int | None]
) -> None:
    """A machine whose products of fewer than `honest` rows depend on how many there are."""

    def mm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.full((len(x), weight.shape[1]), float(len(x) if len(x) < honest else 0))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", lambda y, x, weight, alpha: mm(x, weight))
    assert choose_rows([drawn(8, 8)], drawn(16, 8)) == expected


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("shape", [(192, 576), (576, 1536)], ids=str)
def test_an_adapters_rows_have_the_same_bits_in_any_number_and_place(rank: int, shape: tuple[int, int]) -> None:
    out, into = shape
    router = Router()
    arrange_rows(router, [drawn(out, into)], drawn(64, into))
    base = nn.Linear(into, out, bias=False)
    linear = LoraLinear(base, "x", router)
    adapter = AdapterWeights({"x": (drawn(rank, into, seed=1), drawn(out, rank, seed=2))}, 0.7)
    other = AdapterWeights({"x": (torch.full((rank, into), torch.inf), torch.full((out, rank), torch.nan))}, 1.0)
    total = 192
    x = drawn(total, into, seed=3)
    with torch.inference_mode(), router.use([(adapter, slice(0, total))]):
        whole = linear(x)
    for count in (1, 2, 3, 4, 5, 7, 9, 13, 16, 17, 31, 64, 65, 100, 130):
        for start in (0, 5, total - count):
            company = drawn(total, into, seed=4)
            company[start : start + count] = x[:count]
            places = [(other, slice(0, start)), (adapter, slice(start, start + count))]
            segments = [*places, (None, slice(start + count, total))]
            with torch.inference_mode(), router.use([s for s in segments if s[1].stop > s[1].start]):
                assert torch.equal(linear(company)[start : start + count], whole[:count])
    few = router.row_unit
    with torch.inference_mode(), router.use([(adapter, slice(0, 1)), (None, slice(1, few))]):
        assert torch.equal(linear(torch.cat([x[:1], company[: few - 1]]))[:1], whole[:1])


@pytest.mark.slow
def test_the_same_where_products_depend_on_their_rows() -> None:
    """As on an Intel processor whose MKL is not asked for one order of sums: rows then come in blocks. (Elsewhere the
    variable means nothing.)"""
    if torch.get_num_threads() == 1:
        pytest.skip("the other number of threads runs the whole file")
    tests = [__file__, "-q", "-n", "0", "-k", "any_number_and_place"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        env={**os.environ, "MKL_CBWR": "OFF", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.skipif(not is_intel_avx2(), reason="not a processor with such a mode")
def test_where_sums_have_one_order_a_lone_row_costs_four() -> None:
    """In a process of its own: MKL looks at the variable once."""
    code = (
        "import torch\n"
        "from engines.torch_engine import hardware, invariance\n"
        f"hardware.keep_sums(); torch.set_num_threads({torch.get_num_threads()})\n"
        "print(invariance.choose_rows([torch.randn(*s) for s in ((576, 1536), (192, 576))], torch.randn(4096, 576)))"
    )
    env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "(4, None)"


def test_who_chooses_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for intel, given in ((True, None), (True, "COMPATIBLE"), (False, None)):
        monkeypatch.setattr(hardware, "is_intel_avx2", lambda intel=intel: intel)
        monkeypatch.setenv("MKL_CBWR", "")  # what there is now comes back, whatever is set behind the patch's back
        monkeypatch.delenv("MKL_CBWR")
        if given:
            monkeypatch.setenv("MKL_CBWR", given)
        hardware.keep_sums()
        chosen.append(os.environ.get("MKL_CBWR"))
    assert chosen == ["AUTO,STRICT", "COMPATIBLE", None]


def test_samples_use_fewer_threads_where_no_filling_suits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path), dtype=torch.float32)
    before = torch.get_num_threads()
    suits = Filling.suits
    monkeypatch.setattr(Filling, "suits", lambda filling: filling.threads < before + 1 and suits(filling))
    torch.set_num_threads(before + 1)
    assembly = assemble(model, batch_invariant=True)
    router = assembly.router
    assert router.row_unit > 1  # samples need it
    assert not assembly.info.packed
    seen = []
    model.base_model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    shared = ModelFacts.of(model).passes(model, router)
    assert isinstance(shared, SamplingPass)
    with torch.inference_mode():
        shared.run([Span(shared.open(), torch.zeros(1, 5, dtype=torch.int64), 1, None)])
    assert set(seen) == {before}
    assert torch.get_num_threads() == before + 1
