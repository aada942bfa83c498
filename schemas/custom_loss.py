"""The graph of a custom loss: read from plain data, checked against the list of allowed operations.

A graph is what `torch.fx` traced on the client: nodes in order, each an operation on earlier ones. Checked here without
torch: names, references, constants, sizes. Not responsible for running it (`engines/custom_loss.py`), which looks
everything up in the same list again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from schemas.custom_loss_operations import (
    DTYPES,
    FUNCTIONS,
    KEYWORDS,
    MATH,
    METHODS,
    OPERATORS,
    RESULT_ATTRIBUTES,
    TENSOR_ATTRIBUTES,
    TEXTS,
)
from schemas.errors import InvalidRequest

MAX_NODES = 2000
MAX_INPUTS = 16
MAX_ARGUMENTS = 20_000
"""Values in the arguments of all nodes together."""
MAX_TEXT = 256
MAX_DEPTH = 8
MAX_METRICS = 64

_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_IGNORED_CONSTANTS = frozenset({"layout", "memory_format", "device"})


@dataclass(frozen=True, slots=True)
class LossInput:
    """One parameter of the loss: `logprobs`, or a name in `loss_fn_inputs`, with the rank of its values."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of torch: a dtype, or the device (there is one, whatever it is called), or a layout (ignored)."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    value: str


@dataclass(frozen=True, slots=True)
class LossNode:
    """One operation. Arguments are numbers, text, None, `Ref`, `Constant`, slices, Ellipsis, and lists and tuples."""

    op: Literal["call_function", "call_method"]
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LossGraph:
    """A checked graph: its inputs (`logprobs` first), its operations in order, what it returns."""

    inputs: tuple[LossInput, ...]
    nodes: tuple[LossNode, ...]
    loss: str
    metrics: Mapping[str, str]


def parse_graph(inputs: object, nodes: object) -> LossGraph:
    """Read a graph from JSON values.

    Args:
        inputs: list of {"name", "rank"}.
        nodes: list of {"op", "name", "target", "args", "kwargs"}.

    Raises:
        InvalidRequest: naming the node, and what it may not be.
    """
    declared = _inputs(inputs)
    if not isinstance(nodes, list) or not 2 <= len(nodes) <= MAX_NODES:
        count = len(nodes) if isinstance(nodes, list) else 0
        raise InvalidRequest(f"graph.nodes has {count} nodes; 2 to {MAX_NODES} are accepted", field="graph.nodes")
    reader = _Reader()
    return reader.read(declared, nodes)


def _inputs(inputs: object) -> tuple[LossInput, ...]:
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= MAX_INPUTS:
        count = len(inputs) if isinstance(inputs, list) else 0
        raise InvalidRequest(f"inputs has {count} entries; 1 to {MAX_INPUTS} are accepted", field="inputs")
    found: list[LossInput] = []
    for i, entry in enumerate(inputs):
        name, rank = (entry.get("name"), entry.get("rank")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not _INPUT.fullmatch(name) or any(name == other.name for other in found):
            raise InvalidRequest(
                f"inputs[{i}].name must be a name of its own, of lowercase letters, digits and underscores",
                field=f"inputs[{i}].name",
            )
        if type(rank) is not int or rank not in (0, 1, 2):
            raise InvalidRequest(f"inputs[{i}].rank must be 0, 1 or 2", field=f"inputs[{i}].rank")
        found.append(LossInput(name, rank))
    if found[0].name != "logprobs" or found[0].rank == 0:
        raise InvalidRequest("inputs[0] must be logprobs, of rank 1 or 2", field="inputs[0]")
    return tuple(found)


class _Reader:
    """One reading of one graph. Nodes may refer to earlier ones only, so there are no cycles."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._values = 0
        self._where = "graph.nodes"

    def read(self, inputs: tuple[LossInput, ...], nodes: list[object]) -> LossGraph:
        read: list[LossNode] = []
        returned: tuple[str, Mapping[str, str]] | None = None
        placeholders = iter(inputs)
        for i, node in enumerate(nodes):
            self._where = f"graph.nodes[{i}]"
            if returned is not None:
                self._refuse("comes after the output, which must be the last node")
            op, name, target, args, kwargs = self._fields(node)
            if op == "placeholder":
                self._placeholder(name, target, args, kwargs, next(placeholders, None))
            elif op == "output":
                returned = self._output(args, kwargs)
            elif op == "call_function":
                self._check_function(target, args)
                read.append(LossNode("call_function", name, target, self._args(args), self._kwargs(kwargs)))
            elif op == "call_method":
                if target not in METHODS:
                    self._refuse(f"calls the method {target[:64]!r}, which a custom loss may not")
                read.append(LossNode("call_method", name, target, self._args(args), self._kwargs(kwargs)))
            else:
                self._refuse("is of another kind than placeholder, call_function, call_method and output")
            self._known.add(name)
        if returned is None:
            self._refuse("is the last node, but no output")
        if next(placeholders, None) is not None:
            self._refuse("ends the graph, which does not take every input")
        return LossGraph(inputs, tuple(read), returned[0], returned[1])

    def _fields(self, node: object) -> tuple[str, str, str, list[Any], dict[str, Any]]:
        if not isinstance(node, dict) or not node.keys() <= {"op", "name", "target", "args", "kwargs"}:
            self._refuse("must be an object of op, name, target, args and kwargs")
        op, name, target = (node.get(key) for key in ("op", "name", "target"))
        args, kwargs = node.get("args", []), node.get("kwargs", {})
        if not (isinstance(op, str) and isinstance(name, str) and isinstance(target, str)):
            self._refuse("must have op, name and target, each a text")
        if not (isinstance(args, list) and isinstance(kwargs, dict)):
            self._refuse("must have args as a list and kwargs as an object")
        if not _NODE.fullmatch(name) or name in self._known:
            self._refuse("must have a name of its own")
        return op, name, target, args, kwargs

    def _placeholder(
        self, name: str, target: str, args: list[Any], kwargs: dict[str, Any], due: LossInput | None
    ) -> None:
        if due is None or due.name != target or due.name != name or args or kwargs:
            self._refuse("is a placeholder that does not stand for the input in its place")

    def _check_function(self, target: str, args: list[Any]) -> None:
        module, _, name = target.rpartition(".")
        if target == "getattr":
            self._check_getattr(args)
        elif not (
            target in FUNCTIONS or (module == "operator" and name in OPERATORS) or (module == "math" and name in MATH)
        ):
            self._refuse(f"calls {target[:64]!r}, which a custom loss may not")

    def _check_getattr(self, args: list[Any]) -> None:
        attribute = args[1] if len(args) == 2 else None
        if attribute not in TENSOR_ATTRIBUTES | RESULT_ATTRIBUTES:
            accepted = ", ".join(sorted(TENSOR_ATTRIBUTES | RESULT_ATTRIBUTES))
            self._refuse(f"reads an attribute that a custom loss may not; accepted: {accepted}")

    def _args(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self._value(arg, 0) for arg in args)

    def _kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for key, value in kwargs.items():
            if key not in KEYWORDS:
                self._refuse(f"has the argument {key[:64]!r}, which a custom loss may not use")
            if key == "inplace" and value is not False:
                self._refuse("works in place, which a custom loss may not")
            read = self._value(value, 0)
            ignored = isinstance(read, Constant) and read.kind in ("layout", "memory_format")
            if read is not None and key != "inplace" and not ignored:
                found[key] = read
        return found

    def _value(self, value: Any, depth: int) -> Any:
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_ARGUMENTS:
            self._refuse(f"has arguments that are nested deeper than {MAX_DEPTH}, or there are over {MAX_ARGUMENTS}")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                self._refuse("has an integer of more than 64 bits")
            return value
        if isinstance(value, float):
            return value
        if isinstance(value, str):
            if value not in TEXTS:
                self._refuse(f"has the text {value[:64]!r}; accepted: {', '.join(sorted(TEXTS))}")
            return value
        if isinstance(value, list):
            return [self._value(item, depth + 1) for item in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, content),) = value.items()
            return self._tagged(kind, content, depth)
        self._refuse("has an argument of no known form")

    def _tagged(self, kind: str, content: Any, depth: int) -> Any:
        if kind == "ref" and isinstance(content, str):
            return self._ref(content)
        if kind == "tuple" and isinstance(content, list):
            return tuple(self._value(item, depth + 1) for item in content)
        if kind == "slice" and isinstance(content, list) and len(content) == 3:
            return slice(*(self._value(item, depth + 1) for item in content))
        if kind == "ellipsis" and content is True:
            return Ellipsis
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return math.inf if content == "inf" else -math.inf if content == "-inf" else math.nan
        if kind == "dtype" and content in DTYPES:
            return Constant("dtype", content)
        if kind in _IGNORED_CONSTANTS and isinstance(content, str) and len(content) <= MAX_TEXT:
            return Constant(kind, content)  # type: ignore[arg-type]  # one of the three names
        self._refuse(f"has an argument of the form {kind[:64]!r} that is not known, or not with this content")

    def _ref(self, name: str) -> Ref:
        if name not in self._known:
            self._refuse(f"refers to {name[:64]!r}, which is no earlier node")
        return Ref(name)

    def _output(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[str, Mapping[str, str]]:
        pair = args[0] if len(args) == 1 and not kwargs else None
        parts = pair.get("tuple", []) if isinstance(pair, dict) else pair
        if not isinstance(parts, list) or len(parts) != 2:
            self._refuse("must return a loss and a dictionary of metrics")
        metrics = parts[1].get("dict") if isinstance(parts[1], dict) else None
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            self._refuse(f"must return its metrics as a dictionary of at most {MAX_METRICS}")
        found = {}
        for key, value in metrics.items():
            if not _METRIC.fullmatch(key):
                self._refuse(f"has a metric {key[:64]!r}; it must be named custom/<name>:sum or custom/<name>:mean")
            found[key] = self._returned(value)
        return self._returned(parts[0]), found

    def _returned(self, value: object) -> str:
        name = value.get("ref") if isinstance(value, dict) and len(value) == 1 else None
        if not isinstance(name, str):
            self._refuse("must return values of earlier nodes")
        return self._ref(name).name

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidRequest(f"{self._where} {what}", field=self._where, code="invalid_custom_loss")


def references(value: Any) -> Iterator[str]:
    """The names of the nodes that an argument refers to."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references(item)
    elif isinstance(value, slice):
        yield from references((value.start, value.stop, value.step))
