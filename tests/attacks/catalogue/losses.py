"""Losses of a caller: graphs that reach for the interpreter, never end, or claim more memory than there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.attacks.catalogue.case import Case, spliced
from tests.attacks.catalogue.numbers import batch

LP = {"ref": "logprobs"}
PLACE: dict[str, Any] = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}


def node(name: str, target: str, args: list[Any], op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": args, "kwargs": kwargs}


def output(name: str = "n", metrics: Any = None) -> dict[str, Any]:
    return node("output", "output", [{"tuple": [{"ref": name}, {"dict": metrics or {}}]}], "output")


def upload(nodes: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    """The body that uploads a graph."""
    return {
        "session_id": "$session",
        "custom_loss_seq_id": 9,
        "name": "hostile",
        "inputs": [{"name": "logprobs", "rank": 1}] if inputs is None else inputs,
        "graph": {"nodes": nodes},
        **more,
    }


FUNCTIONS = (
    *("builtins.eval", "builtins.exec", "builtins.__import__", "builtins.open", "os.system", "posix.system"),
    *("subprocess.run", "sys.exit", "time.sleep", "importlib.import_module", "operator.attrgetter"),
    *("operator.methodcaller", "operator.setitem", "operator.lshift", "operator.call", "functools.reduce"),
    *("torch.load", "torch.save", "torch.hub.load", "torch.ops.load_library", "torch.jit.load", "torch.rand"),
    *("torch.exp_", "torch.set_num_threads", "torch.manual_seed", "torch.nonzero", "torch.matmul", "torch.compile"),
    *("torch.utils.cpp_extension.load", "torch.autograd.backward", "torch._C._cuda_init", "math.factorial", "", "exp"),
)
METHODS = (
    *("item", "numpy", "tolist", "data_ptr", "share_memory_", "backward", "register_hook", "add_", "set_", "resize_"),
    *("__class__", "__getattribute__", "__reduce__", "apply_", "map_", "storage", "untyped_storage", "cuda", "cpu"),
)
ATTRIBUTES = ("__class__", "__dict__", "__globals__", "grad_fn", "data", "grad", "_backward_hooks", "requires_grad", 5)


def cases() -> Iterator[Case]:
    """What is refused when it is uploaded; then what is cut when it runs."""
    for target in FUNCTIONS:
        body = upload([PLACE, node("n", target, [LP]), output()])
        yield Case(f"the function {target!r}", "create_custom_loss", body, field="graph.nodes[1]")
    for target in METHODS:
        body = upload([PLACE, node("n", target, [LP], "call_method"), output()])
        yield Case(f"the method {target!r}", "create_custom_loss", body, field="graph.nodes[1]")
    for name in ATTRIBUTES:
        body = upload([PLACE, node("n", "getattr", [LP, name]), output()])
        yield Case(f"the attribute {name!r}", "create_custom_loss", body, field="graph.nodes[1]")
    total = node("n", "sum", [LP], "call_method")
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    for what, nodes, field in (
        ("a cycle", [PLACE, node("n", "abs", [{"ref": "m"}]), node("m", "abs", [{"ref": "n"}])], "graph.nodes[1]"),
        ("a node that refers to itself", [PLACE, node("n", "torch.exp", [{"ref": "n"}]), output()], "graph.nodes[1]"),
        ("a node twice", [PLACE, total, total, output()], "graph.nodes[2]"),
        ("a module", [PLACE, node("n", "evil", [LP], "call_module"), output()], "graph.nodes[1]"),
        ("an attribute of the module", [PLACE, node("n", "evil", [], "get_attr"), output()], "graph.nodes[1]"),
        ("work in place", [PLACE, node("n", "torch.relu", [LP], inplace=True), output()], "graph.nodes[1]"),
        ("an output of its own", [PLACE, node("n", "torch.exp", [LP], out=LP), output()], "graph.nodes[1]"),
        ("an integer of 70 bits", [PLACE, node("n", "operator.mul", [LP, 2**70]), output()], "graph.nodes[1]"),
        ("a text of a megabyte", [PLACE, node("n", "operator.mul", [LP, "x" * 10**6]), output()], "graph.nodes[1]"),
        ("half a million numbers", [PLACE, node("n", "torch.sum", [[1.5] * 500_000]), output()], "graph.nodes[1]"),
        ("lists in each other", [PLACE, node("n", "torch.cat", [deep]), output()], "graph.nodes[1]"),
        ("code", [PLACE, node("n", "torch.exp", [{"code": "x"}]), output()], "graph.nodes[1]"),
        ("no output", [PLACE, total], "graph.nodes"),
        ("two outputs", [PLACE, total, output(), {**output(), "name": "o"}], "graph.nodes"),
        ("20,000 nodes", [PLACE, *(node(f"n{i}", "torch.exp", [LP]) for i in range(20_000)), output("n0")],
         "graph.nodes"),
        ("no nodes", [], "graph.nodes"),
        ("nodes that are none", [1, 2], "graph.nodes"),
        ("a metric with the name of another", [PLACE, total, output("n", {"loss:sum": LP})], "graph.nodes[2]"),
        ("a metric with a line break", [PLACE, total, output("n", {"custom/a\nb:sum": LP})], "graph.nodes[2]"),
        ("a thousand metrics", [PLACE, total, output("n", {f"custom/m{i}:sum": {"ref": "n"} for i in range(1000)})],
         "graph.nodes[2]"),
    ):  # fmt: skip
        yield Case(what, "create_custom_loss", upload(nodes), field=field)
    for literal in ("NaN", "Infinity"):
        body = upload([PLACE, node("n", "operator.mul", [LP, "@@"]), output()])
        yield Case(f"{literal} as a constant", "create_custom_loss", content=spliced(body, literal))
    for what, inputs in (
        ("no inputs", []),
        ("another first input", [{"name": "weights", "rank": 1}]),
        ("17 inputs", [{"name": "logprobs", "rank": 1}, *({"name": f"i{i}", "rank": 1} for i in range(16))]),
        ("an input of three dimensions", [{"name": "logprobs", "rank": 3}]),
        ("an input twice", [{"name": "logprobs", "rank": 1}] * 2),
        ("an input with a path as name", [{"name": "logprobs", "rank": 1}, {"name": "../x", "rank": 1}]),
    ):
        yield Case(what, "create_custom_loss", upload([PLACE, total, output()], inputs), field="inputs")
    for what, config in (
        ("no loss", {}),
        ("a loss that is not there", {"loss_id": "x" * 32}),
        ("a path as loss", {"loss_id": "../x"}),
        ("a number as loss", {"loss_id": 3.0}),
        ("another key beside the loss", {"loss_id": "$loss", "beta": 1.0}),
    ):
        data = {"target_tokens": [6, 7], "weights": [1.0, 1.0]}
        yield Case(f"{what} in a batch", "forward_backward", batch(data, loss="custom", loss_fn_config=config),
                   status=(400, 404), field="loss_fn_config")  # fmt: skip


def _doubling() -> list[dict[str, Any]]:
    nodes = [node("g0", "torch.cat", [[LP, LP]])]
    nodes += [node(f"g{i}", "torch.cat", [[{"ref": f"g{i - 1}"}] * 2]) for i in range(1, 40)]
    return [*nodes, node("n", "torch.sum", [{"ref": "g39"}])]


def _outer() -> list[dict[str, Any]]:
    nodes = [node("m0", "operator.mul", [LP, 1.0])]
    for i in range(1, 30):
        nodes.append(node(f"u{i}", "unsqueeze", [{"ref": f"m{i - 1}"}, -1], "call_method"))
        nodes.append(node(f"m{i}", "operator.mul", [{"ref": f"u{i}"}, LP]))
    return [*nodes, node("n", "torch.sum", [{"ref": "m29"}])]


def _scalar(*nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """A loss that adds the sum of the last node to that of the logprobs."""
    last = {"ref": nodes[-1]["name"]}
    return [*nodes, node("s", "sum", [LP], "call_method"), node("t", "torch.sum", [last]),
            node("n", "operator.add", [{"ref": "s"}, {"ref": "t"}])]  # fmt: skip


BREAKING: dict[str, list[dict[str, Any]]] = {
    "a tensor that doubles forty times": _doubling(),
    "an outer product of thirty axes": _outer(),
    "zeros of a terabyte": _scalar(node("z", "torch.zeros", [10**12])),
    "a repetition of a billion": _scalar(node("z", "repeat", [LP, 10**9], "call_method")),
    "an expansion of a billion": _scalar(node("z", "expand", [LP, 10**9, 2], "call_method")),
    "a range of a trillion": _scalar(node("z", "torch.arange", [10**12])),
    "a power of a billion digits": _scalar(
        node("p", "operator.pow", [10, 10**9]), node("z", "operator.mul", [LP, {"ref": "p"}])
    ),
    "work without end on a small result": _scalar(
        node("z", "torch.zeros", [1 << 23]), *(node(f"s{i}", "sum", [{"ref": "z"}], "call_method") for i in range(200))
    ),
    "an index beyond the tensor": _scalar(
        node("f", "torch.full", [[2], 10**6]), node("l", "long", [{"ref": "f"}], "call_method"),
        node("z", "torch.gather", [LP, 0, {"ref": "l"}]),
    ),
    "shapes that do not fit": _scalar(node("a", "torch.zeros", [7]), node("z", "operator.add", [LP, {"ref": "a"}])),
    "a loss that is no scalar": [node("n", "torch.exp", [LP])],
    "a loss that does not depend on the model": [
        node("d", "detach", [LP], "call_method"), node("n", "torch.sum", [{"ref": "d"}])
    ],
    "an integer as loss": [node("n", "argmax", [LP], "call_method")],
}  # fmt: skip
"""Uploaded without complaint; each breaks when it runs, and costs its own operation only."""

POISON: dict[str, list[dict[str, Any]]] = {
    "a gradient that is not a number": [
        node("z", "operator.sub", [LP, 1.0]), node("l", "torch.log", [{"ref": "z"}]),
        node("m", "operator.mul", [LP, {"ref": "l"}]), node("n", "torch.sum", [{"ref": "m"}]),
    ],
    "a gradient that is infinite": [
        node("z", "operator.sub", [LP, LP]), node("l", "torch.sqrt", [{"ref": "z"}]),
        node("n", "torch.sum", [{"ref": "l"}]),
    ],
}  # fmt: skip
"""Computed, with a gradient that is not finite: the step that would apply it is refused."""


def graph(nodes: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The body that uploads a breaking graph."""
    return json.loads(json.dumps({**upload([PLACE, *nodes, output()]), "custom_loss_seq_id": number}))
