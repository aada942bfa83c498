"""Custom losses: what the SDK traces gives the client's own numbers, and hostile graphs are refused or cut."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from torch import Tensor

from engines.custom_loss import SECONDS, CustomLoss
from engines.torch_engine.engine import TorchEngine
from schemas.custom_loss import MAX_NODES, parse_graph
from schemas.custom_loss_operations import FUNCTIONS, MATH, METHODS, OPERATORS
from schemas.errors import InvalidRequest, NonFiniteGradient, TinsmithError
from schemas.operations import Datum, LoraSpec, OptimStepParams, TrainBatch

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

LP = {"ref": "logprobs"}


def traced(fn: Loss, **ranks: int) -> str:
    """A loss as the SDK uploads it."""
    declared: Any = {"logprobs": 1, **ranks}
    handle = trace_loss(fn, declared, "session")
    return json.dumps(
        {
            "inputs": [{"name": entry.name, "rank": entry.rank} for entry in handle.inputs],
            "nodes": [node.model_dump() for node in encode_graph(handle).nodes],
        }
    )


def plain(*nodes: tuple[str, str, list[Any]], returned: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """A graph of logprobs only; nodes are (op, target, args), named n0, n1, ...; the last one gets `kwargs`."""
    listed: list[dict[str, Any]] = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    for i, (op, target, args) in enumerate(nodes):
        last = kwargs if i == len(nodes) - 1 else {}
        listed.append({"op": op, "name": f"n{i}", "target": target, "args": args, "kwargs": last})
    pair = [{"ref": returned or f"n{len(nodes) - 1}"}, {"dict": {}}]
    listed.append({"op": "output", "name": "output", "target": "output", "args": [{"tuple": pair}]})
    return {"inputs": [{"name": "logprobs", "rank": 1}], "nodes": listed}


def run(graph: dict[str, Any] | str, lp: Tensor | None = None, **inputs: Tensor) -> Any:
    text = graph if isinstance(graph, str) else json.dumps(graph)
    lp = torch.linspace(-3, -1, 5) if lp is None else lp
    return CustomLoss.from_text(text)(lp.requires_grad_(True), inputs, {})


# -- the same numbers as on the client ---------------------------------------------------------------------------------
def ppo_like(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/kl:sum": (old - logprobs).sum().detach()}


def many(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    n = logprobs.shape[0]
    x = torch.where(advantages > 0, logprobs, logprobs * 2)[None, :].expand(3, n)
    y = F.softplus(x) + F.logsigmoid(x) + F.relu(x) + F.silu(x) + F.huber_loss(x, old.expand_as(x), reduction="none")
    z = y.view(-1)[1:].cumsum(0).reshape(-1) / math.sqrt(n) + torch.arange(3 * n - 1, dtype=torch.float32)
    w = torch.cat([z, torch.zeros(n, device=logprobs.device)]).clamp(min=-1e6) ** 2
    top = torch.max(w, dim=0).values + torch.logsumexp(logprobs, dim=-1) + torch.gather(w, 0, torch.argsort(w)).mean()
    masked = logprobs[advantages > 0].sum() + logprobs.masked_fill(~(old > -1), 0.0).sum() - abs(old).sum()
    return w.mean() + top + masked + logprobs[..., -1], {"custom/top:sum": top}


def dpo_like(logprobs: Tensor, reference: Tensor, beta: Tensor, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    margin = (logprobs - reference)[ids].sum() * beta
    return -F.logsigmoid(margin), {"custom/margin:mean": margin}


CASES: list[tuple[Loss, dict[str, Tensor]]] = [
    (ppo_like, {"old": torch.linspace(-2, -0.1, 7), "advantages": torch.linspace(-1, 1, 7)}),
    (many, {"old": torch.linspace(-2, -0.1, 7), "advantages": torch.linspace(-1, 1, 7)}),
    (
        dpo_like,
        {"reference": torch.linspace(-3, 0, 7), "beta": torch.tensor([0.1]), "ids": torch.tensor([0, 3, 3, 6])},
    ),
]


@pytest.mark.parametrize(("fn", "inputs"), CASES)
def test_value_gradient_and_metrics_are_those_of_the_function_itself(fn: Loss, inputs: dict[str, Tensor]) -> None:
    lp = torch.linspace(-3.0, -0.2, 7).requires_grad_(True)
    own = {name: value.reshape(()) if value.numel() == 1 else value for name, value in inputs.items()}
    expected, metrics = fn(lp, **own)
    (slope,) = torch.autograd.grad(expected, lp)
    term = run(traced(fn, **{name: value.dim() for name, value in own.items()}), lp.detach(), **inputs)
    (found,) = torch.autograd.grad(term.loss, term.loss.grad_fn.next_functions[0][0].next_functions[1][0].variable)
    assert torch.equal(term.value, expected.detach())
    assert torch.equal(found, slope)
    assert term.metrics == {key: float(value.detach()) for key, value in metrics.items()}


def test_two_dimensional_logprobs() -> None:
    graph = plain(("call_method", "sum", [LP, 1]), ("call_function", "torch.logsumexp", [{"ref": "n0"}, 0]))
    graph["inputs"][0]["rank"] = 2
    lp = -torch.arange(6.0).reshape(3, 2)
    assert float(run(graph, lp).value) == pytest.approx(float(torch.logsumexp(lp.sum(1), 0)))
    with pytest.raises(InvalidRequest, match="rank 1"):
        run(graph)


# -- refused before anything runs --------------------------------------------------------------------------------------
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("builtins.eval", plain(("call_function", "builtins.eval", ["floor"]))),
    ("os.system", plain(("call_function", "os.system", ["floor"]))),
    ("torch.load", plain(("call_function", "torch.load", ["floor"]))),
    ("torch.ops", plain(("call_function", "torch.ops.aten.add", [LP, LP]))),
    ("torch.hub.load", plain(("call_function", "torch.hub.load", [LP]))),
    ("torch.exp_", plain(("call_function", "torch.exp_", [LP]))),
    ("torch.rand", plain(("call_function", "torch.rand", [5]))),
    ("torch.nonzero", plain(("call_function", "torch.nonzero", [LP]))),
    ("torch.matmul", plain(("call_function", "torch.matmul", [LP, LP]))),
    ("operator.attrgetter", plain(("call_function", "operator.attrgetter", ["shape"]))),
    ("operator.setitem", plain(("call_function", "operator.setitem", [LP, 0, 0]))),
    ("operator.lshift", plain(("call_function", "operator.lshift", [1, 10**9]))),
    ("math.factorial", plain(("call_function", "math.factorial", [10**6]))),
    ("item", plain(("call_method", "item", [LP]))),
    ("numpy", plain(("call_method", "numpy", [LP]))),
    ("add_", plain(("call_method", "add_", [LP, 1]))),
    ("backward", plain(("call_method", "backward", [LP]))),
    ("register_hook", plain(("call_method", "register_hook", [LP, LP]))),
    ("__class__", plain(("call_method", "__class__", [LP]))),
    ("attribute", plain(("call_function", "getattr", [LP, "__class__"]))),
    ("attribute", plain(("call_function", "getattr", [LP, "grad_fn"]))),
    ("attribute", plain(("call_function", "getattr", [LP]))),
    ("out", plain(("call_function", "torch.exp", [LP]), out=LP)),
    ("requires_grad", plain(("call_function", "torch.zeros", [3]), requires_grad=True)),
    ("in place", plain(("call_function", "torch.nn.functional.relu", [LP]), inplace=True)),
    ("trunc", plain(("call_function", "torch.div", [LP, 2]), rounding_mode="trunc")),
    ("nuc", plain(("call_function", "torch.norm", [LP, "nuc"]))),
    ("earlier", plain(("call_function", "torch.exp", [{"ref": "n1"}]), ("call_function", "torch.exp", [LP]))),
    ("earlier", plain(("call_function", "torch.exp", [{"ref": "n0"}]))),
    ("64 bits", plain(("call_function", "operator.mul", [LP, 2**63]))),
    ("form", plain(("call_function", "operator.mul", [LP, {"code": "x"}]))),
    ("form", plain(("call_function", "operator.mul", [LP, {"dtype": "complex64"}]))),
    ("kind", {**plain(("call_module", "x", []))}),
    ("kind", {**plain(("get_attr", "x", []))}),
    ("nodes", plain(*[("call_function", "torch.exp", [LP])] * (MAX_NODES + 1))),
    ("arguments", plain(("call_function", "torch.cat", [[LP] * 30_000]))),
    ("nested", plain(("call_function", "torch.cat", [json.loads("[" * 40 + "]" * 40)]))),
]


@pytest.mark.parametrize(("said", "graph"), HOSTILE, ids=[f"{i}-{said}" for i, (said, _) in enumerate(HOSTILE)])
def test_graphs_outside_the_list_are_refused_before_they_run(said: str, graph: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_graph(graph["inputs"], graph["nodes"])
    assert said in caught.value.message
    assert (caught.value.field or "").startswith("graph.nodes")


def test_malformed_graphs_are_refused() -> None:
    good = plain(("call_method", "sum", [LP]))
    parse_graph(good["inputs"], good["nodes"])
    nodes = good["nodes"]
    seventeen = [{"name": "logprobs", "rank": 1}, *({"name": f"i{i}", "rank": 1} for i in range(16))]
    for inputs in ([], [{"name": "x", "rank": 1}], [{"name": "logprobs", "rank": 0}], seventeen, None, [1]):
        with pytest.raises(InvalidRequest) as caught:
            parse_graph(inputs, nodes)
        assert (caught.value.field or "").startswith("inputs")
    output = nodes[-1]
    for broken in (
        nodes[:-1],
        [*nodes, nodes[1]],
        [*nodes, output],
        [nodes[0], nodes[0], *nodes[1:]],
        nodes[1:],
        [nodes[0], {**nodes[1], "name": "a b"}, output],
        [nodes[0], {**nodes[1], "extra": 1}, output],
        [nodes[0], nodes[1], {**output, "args": [{"ref": "n0"}]}],
        [nodes[0], nodes[1], {**output, "args": [{"tuple": [{"ref": "n0"}, {"dict": {"loss:sum": {"ref": "n0"}}}]}]}],
        [nodes[0], nodes[1], {**output, "args": [{"tuple": [1.0, {"dict": {}}]}]}],
        [1, 2],
        "text",
    ):
        with pytest.raises(InvalidRequest):
            parse_graph(good["inputs"], broken)


# -- cut while they run ------------------------------------------------------------------------------------------------
def doubling(times: int) -> dict[str, Any]:
    nodes: list[tuple[str, str, list[Any]]] = [("call_function", "torch.cat", [[LP, LP]])]
    nodes += [("call_function", "torch.cat", [[{"ref": f"n{i}"}] * 2]) for i in range(times)]
    return plain(*nodes)


def growing(axes: int) -> dict[str, Any]:
    """An outer product of more and more axes, by broadcasting."""
    nodes: list[tuple[str, str, list[Any]]] = [("call_function", "operator.mul", [LP, 1.0])]
    for i in range(axes):
        nodes.append(("call_method", "unsqueeze", [{"ref": f"n{2 * i}"}, -1]))
        nodes.append(("call_function", "operator.mul", [{"ref": f"n{2 * i + 1}"}, LP]))
    return plain(*nodes)


BREAKING: list[tuple[str, dict[str, Any]]] = [
    ("too large", doubling(40)),
    ("too large", growing(20)),
    ("too large", plain(("call_function", "torch.zeros", [10**12]))),
    ("too large", plain(("call_function", "torch.full", [[10**5, 10**5], 1.0]))),
    ("too large", plain(("call_method", "expand", [LP, 10**9, 5]))),
    ("too large", plain(("call_method", "repeat", [LP, 10**9]))),
    ("too large", plain(("call_function", "torch.arange", [10**12]))),
    ("64 bits", plain(("call_function", "operator.pow", [10, 10**9]))),
    ("64 bits", plain(("call_function", "operator.mul", [2**62, 2**62]))),
    ("tensors and numbers", plain(("call_function", "operator.mul", [[1, 2], 10**9]))),
    ("tensors and numbers", plain(("call_function", "operator.mod", ["floor", 1]))),
    ("takes numbers", plain(("call_function", "math.exp", [LP]))),
    ("fails", plain(("call_function", "operator.add", [LP, {"tuple": [1]}]))),
    ("fails", plain(("call_function", "torch.gather", [LP, 0, {"ref": "n0"}]))),
    ("fails", plain(("call_function", "torch.zeros", [3]), ("call_function", "operator.add", [LP, {"ref": "n0"}]))),
    ("fails", plain(("call_method", "view", [LP, {"dtype": "bool"}]))),
    ("fails", plain(("call_function", "torch.where", [LP]))),
    ("fails", plain(("call_function", "getattr", [3, "shape"]))),
    ("scalar", plain(("call_function", "torch.exp", [LP]))),
    ("scalar", plain(("call_function", "operator.add", [1, 2]))),
    ("depend", plain(("call_method", "detach", [LP]), ("call_method", "sum", [{"ref": "n0"}]))),
    ("float", plain(("call_method", "argmax", [LP]))),
]


@pytest.mark.parametrize(("said", "graph"), BREAKING, ids=[f"{i}-{said}" for i, (said, _) in enumerate(BREAKING)])
def test_a_graph_that_breaks_is_an_error_of_its_user(said: str, graph: dict[str, Any]) -> None:
    if said == "fails" and graph["nodes"][1]["target"] == "torch.gather":
        graph = plain(
            ("call_function", "torch.full", [[2], 10**6]),
            ("call_method", "long", [{"ref": "n0"}]),
            ("call_function", "torch.gather", [LP, 0, {"ref": "n1"}]),
        )
    with pytest.raises(InvalidRequest) as caught:
        run(graph)
    assert said in caught.value.message
    assert (caught.value.code, caught.value.category) == ("custom_loss_failed", "user")
    assert "/" not in caught.value.message.replace("loss_fn_config", ""), "no path may be told"


def test_time_is_bounded_over_the_examples_of_a_batch() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += SECONDS / 20
        return now[0]

    loss = CustomLoss.from_text(json.dumps(plain(("call_method", "sum", [LP]))), clock)
    examples = [torch.zeros(3, requires_grad=True)] * 40
    with pytest.raises(InvalidRequest, match="longer than"):
        [loss(lp, {}, {}) for lp in examples]


@pytest.mark.parametrize("timed", [True, False], ids=["first", "again"])
def test_work_is_bounded_even_if_results_are_small(timed: bool) -> None:
    nodes: list[tuple[str, str, list[Any]]] = [
        ("call_function", "torch.zeros", [1 << 23]),
        *[("call_method", "sum", [{"ref": "n0"}])] * 200,
    ]
    loss = CustomLoss.from_text(json.dumps(plain(*nodes)), timed=timed)
    with pytest.raises(InvalidRequest, match="too much work"):
        loss(torch.zeros(3, requires_grad=True), {}, {})


def test_every_name_of_the_list_exists() -> None:
    import operator

    found = {name: getattr(torch, name.removeprefix("torch."), None) for name in FUNCTIONS if name.count(".") == 1}
    assert all(callable(function) for function in found.values())
    assert all(callable(getattr(torch.Tensor, name)) for name in METHODS)
    assert all(callable(getattr(operator, name)) for name in OPERATORS)
    assert all(callable(getattr(math, name)) for name in MATH)
    assert not [name for name in METHODS | FUNCTIONS if name.endswith("_")]


# -- in the engine -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engine(tied_folder: Path) -> TorchEngine:
    engine = TorchEngine(tied_folder, dtype="float32", device="cpu", threads=1)
    engine.load()
    return engine


def batch(adapter: str, graph: str | None, **inputs: Any) -> TrainBatch:
    rng = np.random.default_rng(0)
    datums = []
    for n in (6, 9):
        tokens = rng.integers(3, 250, n + 1)
        arrays = {name: make(n).astype(np.float32) for name, make in inputs.items()}
        datums.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], **arrays}))
    name = "cross_entropy" if graph is None else "custom"
    return TrainBatch(adapter, tuple(datums), name, {}, loss_graph=graph)


def step(engine: TorchEngine, adapter: str, work: TrainBatch) -> tuple[Any, list[Tensor]]:
    engine.create_adapter(adapter, LoraSpec(rank=4, seed=1))
    with engine.train_mode(adapter, zero_grad_on_exit=False):
        result = engine.forward_backward(work)
        engine.optimizer_step(adapter, OptimStepParams(lr=0.01))
    return result, [tensor.detach().clone() for tensor in engine.adapter_weights(adapter).tensors]


def weighted(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/mean_logprob:mean": logprobs.mean()}


def test_a_custom_cross_entropy_trains_as_the_built_in_one(engine: TorchEngine) -> None:
    weights = {"weights": lambda n: np.linspace(-1, 1, n)}
    own, mine = step(engine, "own", batch("own", traced(weighted, weights=1), **weights))
    built_in, theirs = step(engine, "built-in", batch("built-in", None, **weights))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert own.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
    assert own.metrics["custom/nll:sum"] == pytest.approx(own.metrics["loss:sum"], rel=1e-5)
    assert own.metrics["custom/mean_logprob:mean"] == pytest.approx(np.mean([lp.mean() for lp in own.logprobs]))
    assert set(own.metrics) == {"loss:sum", "custom/nll:sum", "custom/mean_logprob:mean"}
    for one, other in zip(own.logprobs, built_in.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_failing_loss_leaves_the_gradient_and_a_nan_poisons_it_by_name(engine: TorchEngine) -> None:
    engine.create_adapter("nan", LoraSpec(rank=4, seed=1))
    ones = {"weights": np.ones}
    with engine.train_mode("nan", zero_grad_on_exit=False):
        engine.forward_backward(batch("nan", None, **ones))
    with pytest.raises(TinsmithError), engine.train_mode("nan", zero_grad_on_exit=False):
        engine.forward_backward(batch("nan", json.dumps(growing(20))))
    zero = engine.optimizer_step("nan", OptimStepParams(lr=0.0)).metrics
    assert zero["grad_norm"] > 0, "what was there before the failure stays"
    graph = plain(("call_method", "sum", [LP]), ("call_function", "torch.sqrt", [{"ref": "n0"}]))
    with engine.train_mode("nan", zero_grad_on_exit=False):
        result = engine.forward_backward(batch("nan", json.dumps(graph)))
    assert math.isnan(result.metrics["loss:sum"])
    with pytest.raises(NonFiniteGradient, match=r"data\[0\]"):
        engine.optimizer_step("nan", OptimStepParams(lr=0.1))
    with engine.eval_mode():
        assert engine.forward(batch("nan", traced(weighted, weights=1), **ones)).metrics["custom/nll:sum"] > 0


def test_time_fails_a_batch_the_first_time_only(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.create_adapter("slow", LoraSpec(rank=4, seed=1))
    work = batch("slow", traced(weighted, weights=1), weights=np.ones)
    with engine.eval_mode():
        expected = engine.forward(work)
        monkeypatch.setattr("engines.custom_loss.SECONDS", -1.0)
        with pytest.raises(InvalidRequest, match="longer than"):
            engine.forward(work)
        assert engine.forward(replace(work, again=True)).metrics == expected.metrics
