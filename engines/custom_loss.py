"""Runs the graph of a custom loss, node by node, within bounds of size and time.

The text of a client never becomes code: each node names an operation of a fixed list, looked up here again, and is
called with values of earlier nodes. Before that it is called on tensors without data, which tells the size of its
result; what is too large is not begun. Everything runs on the CPU: logprobs are small, and there a bad index is an
error, while on a GPU it would end the process. Not responsible for the form of a graph (`schemas/custom_loss.py`).
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engines.loss_term import LossTerm
from schemas.custom_loss import Constant, LossGraph, LossNode, Ref, parse_graph, references
from schemas.custom_loss_operations import (
    FUNCTIONS,
    MATH,
    METHODS,
    OPERATORS,
    RESULT_ATTRIBUTES,
    TENSOR_ATTRIBUTES,
)
from schemas.errors import InvalidRequest, TinsmithError

MAX_CELLS = 1 << 24
"""Numbers in one value."""
MAX_TOTAL_CELLS = 1 << 26
"""Numbers in all values of one datum: the backward pass may need all of them."""
MAX_WORK = 1 << 29
"""Numbers that all operations on one datum read and write, together."""
SECONDS = 10.0
"""Time for all datums of one batch, where it runs for the first time.

Of a clock, and not of work done: that is what the other runs of a turn wait. So it decides only what nobody was told
yet. A batch whose success is in the log runs without it when it is executed again: it has to succeed there too,
however busy the machine is, and its work is the same as the first time.
"""

_MAX_INTEGER = 2**63
_FX_NAMES = {"softplus": "softplus", "log_sigmoid": "logsigmoid", "gelu": "gelu"}
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(slots=True)
class CustomLoss:
    """A graph, ready for the datums of one batch. `clock` is monotonic, in seconds.

    `timed`: whether it may take no more than `SECONDS`; sizes and work are bounded in any case.
    """

    graph: LossGraph
    clock: Callable[[], float] = time.monotonic
    timed: bool = True
    spent: float = field(default=0.0, init=False)

    @classmethod
    def from_text(cls, text: str, clock: Callable[[], float] = time.monotonic, *, timed: bool = True) -> CustomLoss:
        """From the JSON of {"inputs", "nodes"}. Raises `InvalidRequest` as `parse_graph`."""
        content = json.loads(text)
        return cls(parse_graph(content["inputs"], content["nodes"]), clock, timed)

    def __call__(self, lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
        """The loss of one datum.

        Runs apart from the model's own pass: the graph sees a copy of lp, and its gradient g there goes on as
        sum g * lp, which has exactly that gradient. So nothing of the graph can reach further back.

        Args:
            lp: logprobs of the targets, float32 [N] or [N, K].
            inputs: `loss_fn_inputs` by name; those that the graph does not declare are not looked at.

        Raises:
            InvalidRequest: the graph cannot be run on this datum: an operation fails, is too large or takes too long.
        """
        started = self.clock()
        try:
            leaf = lp.detach().cpu().clone().requires_grad_(True)
            with torch.enable_grad(), torch.device("cpu"):
                loss, metrics = _Run(self, leaf, inputs, started).run()
                gradient = self._gradient(loss, leaf)
        finally:
            self.spent += self.clock() - started
        return LossTerm((gradient.to(lp) * lp).sum(), value=loss.detach(), metrics=metrics)

    def _gradient(self, loss: Tensor, leaf: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise _broken("the loss does not depend on logprobs, so it has no gradient")
        try:
            (found,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except _FAILURES as error:
            raise _failed("the gradient of the loss", error) from None
        if found is None:
            raise _broken("the loss does not depend on logprobs, so it has no gradient")
        return found.detach()


class _Run:
    """One graph on one datum."""

    def __init__(self, loss: CustomLoss, lp: Tensor, inputs: Mapping[str, Tensor], started: float) -> None:
        self._graph = loss.graph
        self._clock = loss.clock
        self._deadline = started + SECONDS - loss.spent if loss.timed else math.inf
        self._cells, self._work = 0, 0
        self._values: dict[str, Any] = {"logprobs": lp}
        for declared in self._graph.inputs[1:]:
            self._values[declared.name] = _shaped(inputs[declared.name].cpu(), declared.rank, declared.name)
        if lp.dim() != self._graph.inputs[0].rank:
            raise _broken(f"logprobs has rank {lp.dim()}, but the loss declares {self._graph.inputs[0].rank}")
        self._last_use = _last_uses(self._graph)

    def run(self) -> tuple[Tensor, dict[str, float]]:
        """The loss and the metrics."""
        for place, node in enumerate(self._graph.nodes):
            if self._clock() > self._deadline:
                raise _broken(f"the loss takes longer than {SECONDS:.0f} s for the examples of one request")
            try:
                self._values[node.name] = self._evaluate(node)
            except TinsmithError:
                raise
            except _FAILURES as error:
                raise _failed(f"{node.name} ({node.target})", error) from None
            for name in self._last_use.get(place, ()):
                del self._values[name]
        loss = self._scalar(self._graph.loss, "the loss")
        if not loss.dtype.is_floating_point:
            raise _broken(f"the loss is of {loss.dtype}; it must be a float")
        metrics = {key: float(self._scalar(name, key).detach()) for key, name in self._graph.metrics.items()}
        return loss, metrics

    def _scalar(self, name: str, what: str) -> Tensor:
        value = self._values[name]
        if not isinstance(value, Tensor) or value.dim() != 0:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise _broken(f"{what} must be a scalar tensor, but is {shape}")
        return value

    def _evaluate(self, node: LossNode) -> Any:
        function = _callable(node)
        args = [self._resolve(arg) for arg in node.args]
        kwargs = {key: self._resolve(value) for key, value in node.kwargs.items()}
        makes = node.target.startswith("torch.") or next(_tensors((args, kwargs)), None) is not None
        if makes and node.target != "getattr":
            self._check_size(node, function, args, kwargs)
        return function(*args, **kwargs)

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._values[value.name]
        if isinstance(value, Constant):
            return getattr(torch, value.value) if value.kind == "dtype" else torch.device("cpu")
        if isinstance(value, list | tuple):
            return type(value)(self._resolve(item) for item in value)
        if isinstance(value, slice):
            return slice(*(self._resolve(part) for part in (value.start, value.stop, value.step)))
        return value

    def _check_size(
        self, node: LossNode, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Raise `InvalidRequest` unless the result is within bounds."""
        self._work += sum(tensor.numel() for tensor in _tensors([args, kwargs]))
        if selected := _selected(node, args, kwargs):
            self._take(node, selected)
            return
        with torch.no_grad(), torch.device("meta"):
            result = function(*_to_meta(args), **_to_meta(kwargs))
        self._take(node, sum(tensor.numel() for tensor in _tensors(result)))

    def _take(self, node: LossNode, cells: int) -> None:
        self._cells += cells
        self._work += cells
        if cells > MAX_CELLS or self._cells > MAX_TOTAL_CELLS:
            raise _broken(
                f"{node.name} ({node.target}) would make the values too large: {cells} numbers in one, {self._cells} "
                f"in all; {MAX_CELLS} and {MAX_TOTAL_CELLS} are allowed for an example"
            )
        if self._work > MAX_WORK:
            raise _broken(f"{node.name} ({node.target}) would be too much work for one example")


def _callable(node: LossNode) -> Callable[..., Any]:
    """The operation of a node, out of the fixed list."""
    target = node.target
    module, _, name = target.rpartition(".")
    if node.op == "call_method" and target in METHODS:
        return _method(target)
    if target == "getattr":
        return _attribute
    if target in FUNCTIONS:
        if module == "torch":
            return getattr(torch, name)  # type: ignore[no-any-return]
        return getattr(functional, _FX_NAMES.get(name, name))  # type: ignore[no-any-return]
    if module == "operator" and name in OPERATORS:
        return _getitem if name == "getitem" else _arithmetic(name)
    if module == "math" and name in MATH:
        return _on_numbers(name)
    raise _broken(f"{target[:64]!r} is no operation of a custom loss")


def _method(name: str) -> Callable[..., Any]:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "view" and any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            raise TypeError("view takes a shape; use to() for another dtype")
        return getattr(_tensor(tensor), name)(*args, **kwargs)

    return call


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"a method of a tensor is called on a {type(value).__name__}")
    return value


def _attribute(value: Any, name: str) -> Any:
    allowed = (
        TENSOR_ATTRIBUTES if isinstance(value, Tensor) else RESULT_ATTRIBUTES if _is_result(value) else frozenset()
    )
    if name not in allowed:
        raise TypeError(f"a {type(value).__name__} has no attribute {name!r} here")
    return getattr(value, name)


def _is_result(value: Any) -> bool:
    return isinstance(value, tuple) and type(value).__module__ == "torch.return_types"


def _getitem(value: Any, index: Any) -> Any:
    if not isinstance(value, Tensor | tuple | list):
        raise TypeError(f"a {type(value).__name__} has no items here")
    return value[index]


def _arithmetic(name: str) -> Callable[..., Any]:
    """An operator on tensors and numbers only: on text and lists it could make something huge."""
    function = getattr(operator, name)

    def apply(*operands: Any) -> Any:
        if not all(isinstance(operand, Tensor | bool | int | float) for operand in operands):
            raise TypeError(f"{name} takes tensors and numbers")
        numbers = not any(isinstance(operand, Tensor) for operand in operands)
        if numbers and name == "pow" and all(isinstance(operand, int) for operand in operands):
            base, exponent = operands
            if exponent > 64 or abs(base) ** min(max(exponent, 0), 64) >= _MAX_INTEGER:
                raise OverflowError("an integer of more than 64 bits")
        return _bounded(function(*operands))

    return apply


def _on_numbers(name: str) -> Callable[..., Any]:
    function = getattr(math, name)

    def apply(*operands: Any) -> Any:
        if not all(isinstance(operand, bool | int | float) for operand in operands):
            raise TypeError(f"math.{name} takes numbers; use torch.{name} for tensors")
        return _bounded(function(*operands))

    return apply


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, int) and abs(value) >= _MAX_INTEGER):
        raise OverflowError("a number that is not real, or an integer of more than 64 bits")
    return value


def _shaped(value: Tensor, rank: int, name: str) -> Tensor:
    """An input at its declared rank; a scalar may come as one number in a list."""
    if rank == 0 and value.numel() == 1:
        return value.reshape(())
    if value.dim() != rank:
        raise _broken(f"the input {name} has rank {value.dim()}, but the loss declares {rank}")
    return value


def _selected(node: LossNode, args: list[Any], kwargs: dict[str, Any]) -> int:
    """Most numbers that a selection by a mask returns (its size depends on values); 0 for everything else."""
    name = node.target.rpartition(".")[2]
    masks = [t for t in _tensors(args[1:]) if t.dtype == torch.bool]
    if name == "getitem" and args and isinstance(args[0], Tensor) and masks:
        plain = isinstance(args[1], Tensor) or (isinstance(args[1], tuple) and sum(map(_is_tensor, args[1])) == 1)
        if not plain:
            raise TypeError("a mask cannot be combined with other index tensors here")
        return args[0].numel() * (1 + (sum(i is None for i in args[1]) if isinstance(args[1], tuple) else 0)) or 1
    if name == "masked_select":
        both = list(_tensors((args, kwargs)))
        return max(1, sum((tensor.to("meta") for tensor in both[1:]), both[0].to("meta")).numel())
    return 0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _to_meta(value: Any) -> Any:
    """The same arguments without data."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if _is_result(value):
        return tuple(_to_meta(item) for item in value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_to_meta(part) for part in (value.start, value.stop, value.step)))
    return value


def _last_uses(graph: LossGraph) -> dict[int, list[str]]:
    """Which values are not needed any more after which node, so that memory is given back."""
    kept = {graph.loss, *graph.metrics.values()}
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        last[node.name] = place
        for name in references([*node.args, *node.kwargs.values()]):
            last[name] = place
    uses: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in kept:
            uses.setdefault(place, []).append(name)
    return uses


def _broken(message: str) -> InvalidRequest:
    return InvalidRequest(f"custom loss: {message}", field="loss_fn_config.loss_id", code="custom_loss_failed")


def _failed(what: str, error: Exception) -> Exception:
    """What went wrong in an operation, in its own words but without internals; running out of memory stays that."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return error
    lines = str(error).strip().splitlines() or [""]
    return _broken(f"{what} fails: {type(error).__name__}: {lines[0][:200]}")
