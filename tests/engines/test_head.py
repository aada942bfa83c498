"""The output head: logprobs and gradients against autograd in float64, and what it costs in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engines.lora import AdapterWeights, LoraLinear, Pairs, Router
from engines.torch_engine.head import OutputHead

HIDDEN, VOCAB, RANK = 24, 301, 4
Loss = Callable[[Tensor], Tensor]


@dataclass
class Derivative:
    """The derivative of a loss of a whole datum's logprobs, by autograd, in rows or whole as asked."""

    loss: Loss
    elementwise: bool = True
    calls: int = 0

    def __call__(self, lp: Tensor, rows: slice) -> Tensor:
        self.calls += 1
        with torch.enable_grad():
            leaf = lp.detach().clone().requires_grad_()
            (grad,) = torch.autograd.grad(self.loss(leaf), leaf)
        return grad


@dataclass
class Weighted:
    """The derivative of -sum(weights * lp)."""

    weights: Tensor
    elementwise: bool = True

    def __call__(self, lp: Tensor, rows: slice) -> Tensor:
        assert lp.shape == self.weights[rows].shape
        return -self.weights[rows]


@dataclass
class Case:
    """A head, an adapter and one datum, of random numbers."""

    head: OutputHead
    adapter: AdapterWeights | None
    hidden: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls,
        rows: int = 50,
        *,
        k: int | None = None,
        adapted: bool = True,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        **head: Any,
    ) -> Case:
        """`head`: scale, softcap and chunk_rows of the head."""
        g = torch.Generator().manual_seed(7)
        linear = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g))
        linear.requires_grad_(False)
        down, up = torch.randn(RANK, HIDDEN, generator=g) * 0.3, torch.randn(VOCAB, RANK, generator=g) * 0.3
        adapter = AdapterWeights({"lm_head": (down, up)}, 1.5) if adapted else None
        hidden = torch.randn(rows, HIDDEN, generator=g)
        targets = torch.randint(VOCAB, (rows,) if k is None else (rows, k), generator=g)
        return cls(OutputHead(LoraLinear(linear, "lm_head", Router()), VOCAB, **head), adapter, hidden, targets)

    def blank(self) -> Pairs:
        """Zeros in the shape of the adapter."""
        return {} if self.adapter is None else {n: (a * 0, b * 0) for n, (a, b) in self.adapter.pairs.items()}

    def reference(self, hidden: Tensor, pair: tuple[Tensor, Tensor] | None) -> Tensor:
        """Logprobs from the whole matrix of logits, in the dtype of `hidden`."""
        linear: Any = self.head.linear
        logits = hidden @ linear.weight.to(hidden.dtype).t()
        if linear.bias is not None:
            logits = logits + linear.bias.to(hidden.dtype)
        if pair is not None and self.adapter is not None:
            logits = logits + self.adapter.scaling * (hidden @ pair[0].t()) @ pair[1].t()
        logits = logits * self.head.scale
        if self.head.softcap is not None:
            logits = torch.tanh(logits / self.head.softcap) * self.head.softcap
        columns = self.targets.view(len(hidden), -1)
        return torch.log_softmax(logits, -1).gather(1, columns).view(self.targets.shape)

    def expected(self, loss: Loss) -> tuple[Tensor, list[Tensor]]:
        """Logprobs and the gradients of hidden, A and B in float64."""
        leaves = [self.hidden.double().requires_grad_()]
        if self.adapter is not None:
            leaves += [tensor.double().requires_grad_() for tensor in self.adapter.pairs["lm_head"]]
        lp = self.reference(leaves[0], (leaves[1], leaves[2]) if len(leaves) > 1 else None)
        return lp.detach(), list(torch.autograd.grad(loss(lp), leaves))

    def computed(self, upstream: Any) -> tuple[Tensor, list[Tensor]]:
        """The same by the head."""
        gradient = self.blank()
        lp, back = self.head.logprobs_and_gradient(self.hidden, self.targets, self.adapter, gradient, upstream)
        return lp, [back, *gradient.get("lm_head", ())]

    def check(self, loss: Loss, upstream: Any, tolerance: float = 2e-5) -> None:
        """Head and reference agree, and a pass without gradient gives the same bits."""
        lp, found = self.computed(upstream)
        wanted_lp, wanted = self.expected(loss)
        assert lp.dtype == torch.float32
        assert lp.shape == self.targets.shape
        torch.testing.assert_close(lp.double(), wanted_lp, rtol=tolerance, atol=tolerance)
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == torch.float32
            assert (ours - theirs).norm() <= tolerance * theirs.norm()
        assert torch.equal(self.head.logprobs(self.hidden, self.targets, self.adapter), lp)


def weights_like(targets: Tensor, zeros: float = 0.0) -> Tensor:
    """Weights of both signs; that share of the elements is zero."""
    g = torch.Generator().manual_seed(3)
    values = torch.randn(targets.shape, generator=g)
    return values * (torch.rand(targets.shape, generator=g) >= zeros)


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no adapter": {"adapted": False},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 5.0},
    "all": {"bias": True, "scale": 0.7, "softcap": 4.0},
}


@pytest.mark.parametrize("rows", [None, 16], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("head", HEADS)
def test_logprobs_and_gradients_are_those_of_autograd(head: str, k: int | None, rows: int | None) -> None:
    case = Case.of(k=k, chunk_rows=rows, **HEADS[head])
    weights = weights_like(case.targets)
    case.check(lambda lp: -(weights.to(lp.dtype) * lp).sum(), Weighted(weights))


@pytest.mark.parametrize("rows", [None, 16], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("zeros", [0.75, 1.0])
def test_rows_without_weight_get_logprobs_and_a_zero_gradient(zeros: float, k: int | None, rows: int | None) -> None:
    case = Case.of(k=k, chunk_rows=rows, softcap=5.0)
    weights = weights_like(case.targets, zeros)
    case.check(lambda lp: -(weights.to(lp.dtype) * lp).sum(), Weighted(weights))
    silent = (weights.view(50, -1) == 0).all(1)
    assert silent.any()
    assert not case.computed(Weighted(weights))[1][0][silent].any()


def test_a_target_may_stand_twice_in_a_row() -> None:
    case = Case.of(k=4, chunk_rows=16)
    case.targets[:, 2] = case.targets[:, 0]
    case.targets[5] = 9
    weights = weights_like(case.targets)
    case.check(lambda lp: -(weights.to(lp.dtype) * lp).sum(), Weighted(weights))


def test_weights_of_a_row_may_cancel() -> None:
    case = Case.of(k=2)
    weights = torch.tensor([1.0, -1.0]).expand(50, 2).contiguous()
    case.check(lambda lp: -(weights.to(lp.dtype) * lp).sum(), Weighted(weights))


def test_a_probability_near_one_keeps_its_small_gradient() -> None:
    case = Case.of(adapted=False)
    linear: Any = case.head.linear
    case.hidden.copy_(0.4 * linear.weight[case.targets])
    lp = case.head.logprobs(case.hidden, case.targets, None)
    assert (lp > -0.1).float().mean() > 0.3
    weights = torch.ones(50)
    case.check(lambda lp: -(weights.to(lp.dtype) * lp).sum(), Weighted(weights))


@pytest.mark.parametrize("rows", [None, 16], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("zeros", [0.0, 0.7])
def test_a_loss_of_the_whole_datum_is_asked_once(zeros: float, rows: int | None) -> None:
    case = Case.of(chunk_rows=rows, scale=0.5, bias=True)
    mask = weights_like(case.targets, zeros) != 0

    def loss(lp: Tensor) -> Tensor:
        return (lp * mask).sum().square() / 100 + (lp * mask).cumsum(0).square().sum() / 1000

    upstream = Derivative(loss, elementwise=False)
    case.check(loss, upstream)
    assert upstream.calls == 1


def test_an_elementwise_loss_is_asked_chunk_by_chunk() -> None:
    case = Case.of(chunk_rows=16)
    upstream = Derivative(lambda lp: lp.square().sum())
    case.check(lambda lp: lp.square().sum(), upstream)
    assert upstream.calls == 4


@pytest.mark.parametrize("head", ["plain", "all"])
def test_one_token(head: str) -> None:
    case = Case.of(1, chunk_rows=16, **HEADS[head])
    case.check(lambda lp: 2 * lp.sum(), Weighted(torch.full((1,), -2.0)))


def test_gradient_agrees_with_finite_differences() -> None:
    case = Case.of(6, softcap=6.0, scale=0.8, bias=True)
    weights = weights_like(case.targets).double()
    assert case.adapter is not None
    points = [case.hidden.double(), *(tensor.double() for tensor in case.adapter.pairs["lm_head"])]

    def loss(points: list[Tensor]) -> float:
        lp = case.reference(points[0], (points[1], points[2]))
        return float(-(weights * lp.exp()).sum())

    with torch.no_grad():
        found = case.computed(Derivative(lambda lp: -(weights.float() * lp.exp()).sum()))[1]
    g = torch.Generator().manual_seed(1)
    for place, gradient in enumerate(found):
        for _ in range(5):
            direction = torch.randn(points[place].shape, generator=g, dtype=torch.float64)
            ahead, behind = list(points), list(points)
            ahead[place], behind[place] = points[place] + 1e-5 * direction, points[place] - 1e-5 * direction
            slope = (loss(ahead) - loss(behind)) / 2e-5
            assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("k", [None, 3])
def test_half_precision_weights_round_the_base_products_only(k: int | None) -> None:
    """The reference in the same steps: bfloat16 in and out of the two products with the weight, the rest float32."""
    case = Case.of(k=k, dtype=torch.bfloat16, bias=True, scale=0.5, chunk_rows=16)
    weights = weights_like(case.targets, 0.3)
    linear: Any = case.head.linear
    assert case.adapter is not None
    down, up = case.adapter.pairs["lm_head"]
    logits = (case.hidden.bfloat16() @ linear.weight.t()).float() + linear.bias.float()
    logits = ((logits + case.adapter.scaling * (case.hidden @ down.t()) @ up.t()) * case.head.scale).requires_grad_()
    columns = case.targets.view(50, -1)
    lp = torch.log_softmax(logits, -1).gather(1, columns).view(case.targets.shape)
    (slope,) = torch.autograd.grad(-(weights * lp).sum(), logits)
    slope = slope * case.head.scale
    wanted = [
        slope @ linear.weight.float() + case.adapter.scaling * (slope @ up) @ down,
        case.adapter.scaling * (slope @ up).t() @ case.hidden,
        case.adapter.scaling * slope.t() @ (case.hidden @ down.t()),
    ]
    found_lp, found = case.computed(Weighted(weights))
    torch.testing.assert_close(found_lp, lp.detach(), rtol=1e-5, atol=2e-5)
    for ours, theirs, tolerance in zip(found, wanted, (6e-3, 1e-5, 1e-5), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
    assert torch.equal(case.head.logprobs(case.hidden, case.targets, case.adapter), found_lp)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("rows", [None, 16], ids=["one chunk", "chunks"])
def test_a_derivative_that_is_not_finite_shows(rows: int | None, elementwise: bool, k: int | None, bad: float) -> None:
    case = Case.of(k=k, chunk_rows=rows)
    weights = torch.zeros(case.targets.shape)
    weights[20] = bad
    lp, found = case.computed(Weighted(weights, elementwise))
    assert torch.isfinite(lp).all()
    assert not torch.isfinite(found[0][20]).any()
    others = torch.arange(50) != 20
    assert not found[0][others].any()
    assert not torch.isfinite(found[1]).all()
    assert not torch.isfinite(found[2]).all()


def test_logprobs_that_are_not_finite_are_returned() -> None:
    case = Case.of(chunk_rows=16)
    case.hidden[3] = float("nan")
    lp = case.computed(Weighted(torch.ones(50)))[0]
    assert torch.isnan(lp[3])
    assert torch.isfinite(lp[4:]).all()
    assert torch.equal(torch.isnan(case.head.logprobs(case.hidden, case.targets, None)), torch.isnan(lp))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["plain", "all"])
def test_earlier_calls_leave_no_trace(head: str, dtype: torch.dtype) -> None:
    case = Case.of(dtype=dtype, chunk_rows=16, **HEADS[head])
    weights = Weighted(weights_like(case.targets, 0.5))
    lp, found = case.computed(weights)
    broken = Case.of(100)
    broken.hidden.fill_(float("nan"))
    case.head.logprobs_and_gradient(broken.hidden, broken.targets, None, None, Weighted(torch.ones(100), False))
    # A slice of a longer vector that begins off the usual border of memory.
    pack = torch.cat([torch.zeros(1), case.hidden.view(-1)])
    case.hidden = pack[1:].view(case.hidden.shape)
    lp_again, again = case.computed(weights)
    assert torch.equal(lp, lp_again)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_gradients_add_up() -> None:
    case = Case.of()
    gradient = case.blank()
    for _ in range(3):
        case.head.logprobs_and_gradient(case.hidden, case.targets, case.adapter, gradient, Weighted(torch.ones(50)))
    once = case.computed(Weighted(torch.ones(50)))[1]
    for total, single in zip(gradient["lm_head"], once[1:], strict=True):
        torch.testing.assert_close(total, 3 * single, rtol=1e-5, atol=1e-4)


def test_an_adapter_without_the_head_and_no_place_for_the_gradient() -> None:
    case = Case.of()
    other = {"model.layers.0.mlp.up_proj": (torch.zeros(1, 1), torch.zeros(1, 1))}
    upstream = Weighted(torch.ones(50))
    bare = case.head.logprobs_and_gradient(case.hidden, case.targets, None, None, upstream)
    foreign = case.head.logprobs_and_gradient(case.hidden, case.targets, AdapterWeights(other, 2.0), other, upstream)
    assert torch.equal(bare[0], foreign[0])
    assert torch.equal(bare[1], foreign[1])
    adapted = case.head.logprobs_and_gradient(case.hidden, case.targets, case.adapter, None, upstream)
    assert torch.equal(adapted[1], case.computed(upstream)[1][0])
    assert not torch.equal(adapted[0], bare[0])


def test_agrees_with_the_logits_that_are_checked_against_the_model() -> None:
    case = Case.of(bias=True, scale=0.7, softcap=4.0)
    linear: Any = case.head.linear
    with torch.no_grad(), linear.router.use([(case.adapter, slice(0, 1))]):
        full = torch.log_softmax(case.head.logits(case.hidden), -1)
    lp = case.head.logprobs(case.hidden, case.targets, case.adapter)
    torch.testing.assert_close(lp, full.gather(1, case.targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)


def test_a_tied_weight_is_never_written() -> None:
    embedding = nn.Embedding(VOCAB, HIDDEN)
    case = Case.of(chunk_rows=16)
    linear: Any = case.head.linear
    linear.base.weight = embedding.weight
    before = embedding.weight.detach().clone()
    lp, found = case.computed(Weighted(torch.ones(50)))
    assert torch.equal(embedding.weight, before)
    assert embedding.weight.grad is None
    assert not lp.requires_grad
    assert not any(tensor.requires_grad for tensor in found)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest storage that an operation made, those given aside."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.elements = known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elementwise", [True, False])
def test_a_warm_head_makes_nothing_of_the_size_of_a_chunk(elementwise: bool, dtype: torch.dtype) -> None:
    vocab, rows = 1 << 17, 32
    linear = nn.Linear(4, vocab, bias=False, dtype=dtype).requires_grad_(False)
    head = OutputHead(LoraLinear(linear, "lm_head", Router()), vocab, softcap=20.0, chunk_rows=rows)
    adapter = AdapterWeights({"lm_head": (torch.randn(2, 4), torch.randn(vocab, 2))}, 1.0)
    gradient = {"lm_head": (torch.zeros(2, 4), torch.zeros(vocab, 2))}
    hidden, targets = torch.randn(2 * rows, 4), torch.arange(2 * rows)
    upstream = Weighted(torch.arange(2 * rows) % 4 * 1.0, elementwise)
    head.logprobs_and_gradient(hidden, targets, adapter, gradient, upstream)
    known = [*head._scratch._flat.values(), linear.weight, *adapter.tensors, *gradient["lm_head"]]
    assert sum(flat.numel() for flat in head._scratch._flat.values()) <= 2 * rows * vocab
    with _Largest({tensor.untyped_storage().data_ptr() for tensor in known}) as seen:
        head.logprobs_and_gradient(hidden, targets, adapter, gradient, upstream)
    assert 0 < seen.elements <= rows * vocab // 4


_PEAK = """
import resource, torch
from torch import nn
from engines.lora import AdapterWeights, LoraLinear, Router
from engines.torch_engine.head import OutputHead
torch.set_num_threads(1)
vocab, width, rows = 1 << 15, 16, 2048
linear = nn.Linear(width, vocab, bias=False).requires_grad_(False)
head = OutputHead(LoraLinear(linear, "lm_head", Router()), vocab, chunk_rows=64)
adapter = AdapterWeights({"lm_head": (torch.randn(4, width), torch.randn(vocab, 4))}, 1.0)
gradient = {"lm_head": (torch.zeros(4, width), torch.zeros(vocab, 4))}
class Upstream:
    elementwise = True
    def __call__(self, lp, rows):
        return torch.ones_like(lp)
upstream = Upstream()
def run(count):
    hidden, targets = torch.randn(count, width), torch.zeros(count, dtype=torch.int64)
    head.logprobs_and_gradient(hidden, targets, adapter, gradient, upstream)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = run(64)
for upstream.elementwise in (True, False):
    print((run(rows) - small) // 1024)
"""


def test_a_long_datum_needs_no_more_memory_than_a_chunk() -> None:
    """Its logits would be 256 MiB; the peak of the process grows by a small part of that."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    growth = [int(line) for line in done.stdout.split()]
    assert len(growth) == 2, done.stdout
    assert max(growth) <= 40, growth
