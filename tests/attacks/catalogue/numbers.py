"""Numbers that no honest client sends: not finite, out of range, of another type, and tensors that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.proto import tinker_public_pb2 as pb
from tests.attacks.catalogue.case import PROTOBUF, Case, Targets, spliced

LITERALS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400")
"""What is no JSON, or no double."""


def batch(inputs: Any = None, *, tokens: Any = (5, 6), loss: str = "cross_entropy", **more: Any) -> dict[str, Any]:
    """A batch of one example for the attacker's model."""
    given = {"target_tokens": [6, 7]} if inputs is None else inputs
    return {"model_id": "$model", "data": [{"model_input": tokens, "loss_fn_inputs": given}], "loss_fn": loss, **more}


POLICY = {"target_tokens": [6, 7], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
STEP: dict[str, Any] = {"model_id": "$model"}
SAMPLE: dict[str, Any] = {"sampling_session_id": "$sampler", "prompt": [5, 6]}


def cases() -> Iterator[Case]:
    """In training, in steps, in samples and in geometry."""
    yield from _training()
    yield from _tensors()
    yield from _steps()
    yield from _samples()
    yield from _geometry()


def _training() -> Iterator[Case]:
    place = "data[0].loss_fn_inputs"
    for literal in LITERALS:
        yield Case(
            f"{literal} as weight", "forward_backward",
            content=spliced(batch({"target_tokens": [6, 7], "weights": [1.0, "@@"]}), literal), says="not valid JSON",
        )  # fmt: skip
    for name in ("advantages", "logprobs"):
        for value in (1e39, -1e39, 1e300):
            yield Case(
                f"{value:g} in {name}", "forward_backward", batch({**POLICY, name: [1.0, value]}, loss="ppo"),
                field=f"{place}.{name}",
            )  # fmt: skip
    for what, tokens, field in (
        ("a negative token", [-1, 5], "data[0].model_input"),
        ("a token beyond the vocabulary", [5, 259], "data[0].model_input"),
        ("a token of 31 bits", [5, 2**31 - 1], "data[0].model_input"),
        ("a token of 63 bits", [5, 2**63], "data[0].model_input"),
        ("a token of 70 bits", [5, 2**70], "data[0].model_input"),
        ("a token with a fraction", [5, 6.5], "data[0].model_input"),
        ("a token that is a truth value", [5, True], "data[0].model_input"),
        ("a token that is a text", [5, "6"], "data[0].model_input"),
        ("a token that is null", [5, None], "data[0].model_input"),
        ("no tokens", [], "data[0].model_input"),
        ("no chunks", {"chunks": []}, "data[0].model_input"),
        ("chunks without tokens", {"chunks": [{"tokens": []}]}, "data[0].model_input"),
        ("a text for tokens", "hello", "data[0].model_input"),
        ("lists of tokens", [[5, 6]], "data[0].model_input"),
    ):
        yield Case(f"{what} as input", "forward_backward", batch(tokens=tokens), field=field)
    yield Case("more tokens than positions", "forward_backward", batch({"target_tokens": [6] * 257}, tokens=[5] * 257),
               field="data[0].model_input")  # fmt: skip
    for what, targets in (
        ("a negative target", [-6, 7]),
        ("a target beyond the vocabulary", [6, 259]),
        ("a target of 63 bits", [6, 2**63]),
        ("a target with a fraction", [6.5, 7]),
        ("one target too few", [6]),
        ("one target too many", [6, 7, 8]),
        ("no targets", []),
        ("targets of three dimensions", [[[6]], [[7]]]),
        ("ragged targets", [[6, 7], [8]]),
        ("a text for targets", "ab"),
        ("null for targets", [None, None]),
    ):
        yield Case(what, "forward_backward", batch({"target_tokens": targets}), field=f"{place}.target_tokens")
    for what, body, field in (
        ("no examples", {**batch(), "data": []}, "data"),
        ("an example without inputs", batch({}), place),
        ("targets of two dimensions where one is due", batch({**POLICY, "target_tokens": [[6], [7]]}, loss="ppo"),
         f"{place}.target_tokens"),
        ("a batch given twice", {**batch(), "datums": batch()["data"]}, None),
        ("9,000 examples", {**batch(), "data": batch()["data"] * 9000}, "data"),
        ("a negative number of the request", batch(seq_id=-1), "seq_id"),
        ("number 0 of the request", batch(seq_id=0), "seq_id"),
        ("a number of the request beyond 63 bits", batch(seq_id=2**63), "seq_id"),
        ("a number of the request that is a text", batch(seq_id="1"), "seq_id"),
        ("a number of the request that is true", batch(seq_id=True), "seq_id"),
    ):  # fmt: skip
        yield Case(what, "forward_backward", body, field=field)
    for key, value, field in (
        ("clip_low_threshold", 2.0, "clip_low_threshold"),
        ("clip_low_threshold", -0.5, "clip_low_threshold"),
        ("clip_high_threshold", 0.1, ""),
        ("clip_high_threshold", -1.0, "clip_high_threshold"),
        ("clip_high_threshold", "1.2", "clip_high_threshold"),
        ("clip_high_threshold", True, "clip_high_threshold"),
        ("clip_high_threshold", None, "clip_high_threshold"),
        ("clip_high_threshold", [1.2], "clip_high_threshold"),
        ("clip_high_threshold", {"data": [1.2], "dtype": "float32"}, "clip_high_threshold"),
        ("clip_high_threshold", 1e300, "clip_high_threshold"),
        ("kl_beta", 1.0, "kl_beta"),
        ("__class__", 1.0, ""),
    ):
        yield Case(
            f"{key} = {value} of ppo", "forward_backward", batch(POLICY, loss="ppo", loss_fn_config={key: value}),
            field=f"loss_fn_config.{field}" if field else "loss_fn_config",
        )  # fmt: skip
    for name in ("no_such_loss", "", "PPO", "ppo ", "__import__", "../ppo", "x" * 300, "ppo\x00"):
        yield Case(f"{name[:20]!r} as loss", "forward_backward", batch(POLICY, loss=name), field="loss_fn")


def _tensors() -> Iterator[Case]:
    """Objects of data, dtype, shape and CSR indices whose parts do not fit together."""
    place = "data[0].loss_fn_inputs.target_tokens"
    flat = {"data": [6, 7], "dtype": "int64"}
    for what, tensor in (
        ("a shape of another size", {**flat, "shape": [3]}),
        ("a shape with a negative side", {**flat, "shape": [-2]}),
        ("a shape with a side of 0", {**flat, "shape": [0, 2]}),
        ("a shape that overflows 64 bits", {**flat, "shape": [2**62, 2**62]}),
        ("a shape whose product wraps to the right size", {**flat, "shape": [2**63, 2**63]}),
        ("a shape of nine sides", {**flat, "shape": [1] * 8 + [2]}),
        ("a shape of three sides", {**flat, "shape": [1, 1, 2]}),
        ("a shape that is a text", {**flat, "shape": "2"}),
        ("a shape with a fraction", {**flat, "shape": [2.0]}),
        ("an unknown dtype", {**flat, "dtype": "float16"}),
        ("a dtype of the interpreter", {**flat, "dtype": "object"}),
        ("a text for data", {**flat, "data": "AAAA"}),
        ("an object for data", {**flat, "data": {"0": 6}}),
        ("a tensor in a tensor", {"data": [flat], "dtype": "int64"}),
        ("an unknown part", {**flat, "requires_grad": True}),
    ):
        yield Case(f"{what} of a tensor", "forward_backward", batch({"target_tokens": tensor}), field=place)
    sparse = {
        "data": [6, 7],
        "dtype": "int64",
        "shape": [2, 300],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [0, 1],
    }
    for what, change in (
        ("row pointers that fall", {"sparse_crow_indices": [0, 2, 1]}),
        ("row pointers that begin at 1", {"sparse_crow_indices": [1, 1, 2]}),
        ("row pointers beyond the values", {"sparse_crow_indices": [0, 1, 2**40]}),
        ("negative row pointers", {"sparse_crow_indices": [0, -1, 2]}),
        ("row pointers beyond 64 bits", {"sparse_crow_indices": [0, 1, 2**70]}),
        ("one row pointer too few", {"sparse_crow_indices": [0, 2]}),
        ("a column beyond the shape", {"sparse_col_indices": [0, 300]}),
        ("a negative column", {"sparse_col_indices": [-1, 1]}),
        ("a column twice", {"sparse_crow_indices": [0, 2, 2], "sparse_col_indices": [1, 1]}),
        ("one column too few", {"sparse_col_indices": [0]}),
        ("no columns", {"sparse_col_indices": None}),
        ("no shape", {"shape": None}),
        ("a claim of a trillion numbers", {"shape": [2, 2**39]}),
        ("a claim that overflows", {"shape": [2, 2**62]}),
        ("nested values", {"data": [[6], [7]]}),
    ):
        yield Case(f"{what} of a sparse tensor", "forward_backward", batch({"target_tokens": {**sparse, **change}}),
                   field=place)  # fmt: skip


def _steps() -> Iterator[Case]:
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        for literal in LITERALS:
            body = {**STEP, "adam_params": {name: "@@"}}
            yield Case(f"{literal} as {name}", "optim_step", content=spliced(body, literal), says="not valid JSON")
        for value in (-1.0, -1e-300, "0.1", None, True, [0.1], {"data": [0.1]}, 1e300):
            yield Case(f"{value} as {name}", "optim_step", {**STEP, "adam_params": {name: value}},
                       field=f"adam_params.{name}")  # fmt: skip
    for what, params, field in (
        ("beta1 of 1", {"beta1": 1.0}, "beta1"),
        ("beta2 of 1", {"beta2": 1.0}, "beta2"),
        ("eps of 0", {"eps": 0.0}, "eps"),
        ("eps of -0", {"eps": -0.0}, "eps"),
        ("a learning rate of 1e5", {"learning_rate": 1e5}, "learning_rate"),
        ("two names of the learning rate", {"learning_rate": 0.1, "lr": 0.2}, ""),
        ("a third beta", {"betas": [0.9, 0.9, 0.9]}, "betas"),
        ("an unknown hyperparameter", {"momentum": 0.9}, "momentum"),
    ):
        where = f"adam_params.{field}" if field else "adam_params"
        yield Case(what, "optim_step", {**STEP, "adam_params": params}, field=where)
    for what, params in (
        ("an unknown optimizer", {"type": "sgd", "learning_rate": 0.1}),
        ("an optimizer by its path", {"type": "torch.optim.SGD", "learning_rate": 0.1}),
        ("no optimizer", {"learning_rate": 0.1}),
        ("another optimizer than the model's", {"type": "dimuon", "learning_rate": 0.1}),
    ):
        yield Case(what, "optim_step", {**STEP, "optimizer_params": params}, field="optimizer_params")


def _samples() -> Iterator[Case]:
    for name in ("temperature", "top_p"):
        for literal in LITERALS:
            body = {**SAMPLE, "sampling_params": {name: "@@"}}
            yield Case(f"{literal} as {name}", "asample", content=spliced(body, literal), says="not valid JSON")
    for name, values in (
        ("temperature", (-1.0, -1e-300, 1e-45, 1e-9, 1001.0, "1", None, True)),
        ("top_p", (0.0, -0.0, 2.0, -1.0, "1", None)),
        ("top_k", (-2, 2**31, 1.5, "5", True)),
        ("max_tokens", (0, -1, 2**31, 257, 1.5, "5")),
        ("seed", (-1, 1.5, "5", True)),
        ("stop", ([259], [-1], [2**40], [""], ["x" * 1025], ["s"] * 10_000, [5, "x"], [[5]], {"x": 1}, 5, "")),
        ("best_of", (2,)),
        ("logit_bias", ({"5": 100},)),
    ):  # fmt: skip
        for value in values:
            yield Case(f"{str(value)[:40]} as {name}", "asample", {**SAMPLE, "sampling_params": {name: value}},
                       field=f"sampling_params.{name}")  # fmt: skip
    for name, values in (
        ("num_samples", (0, -1, 10**6, 2**63, 1.5, "2", None)),
        ("prompt", ([], [-1], [259], [2**63], [5] * 257, "text", None, [[5]], {"chunks": []})),
        ("topk_prompt_logprobs", (-1, 260, 2**40, 1.5)),
        ("topk_sample_logprobs", (-1, 260, 2**40, 1.5)),
        ("prompt_alt_tokens_k", (-1, 2**40)),
        ("seq_id", (-1, 2**63, "0", True)),
        ("target_prompt_logprobs", ({"data": [5, 6], "dtype": "int64", "shape": [2, 1]}, [[259]], [[1.5]], [-2], "x")),
        ("prompt_logprobs_last_n", (0, 2, -1)),
    ):  # fmt: skip
        more = {"prompt_logprobs": True} if name in ("topk_prompt_logprobs", "prompt_logprobs_last_n") else {}
        for value in values:
            yield Case(f"{str(value)[:40]} as {name}", "asample", {**SAMPLE, **more, name: value}, field=name)


def _geometry() -> Iterator[Case]:
    new = {"session_id": "$session", "model_seq_id": 9, "base_model": "acme/tiny"}
    for name, values in (
        ("rank", (0, -1, 257, 2**20, 2**63, 1.5, "8", None, True)),
        ("seed", (-1, 2**63, 1.5, "1")),
        ("train_attn", (0, "yes", None)),
        ("alpha", (8,)),
        ("target_modules", (["q_proj"],)),
    ):
        for value in values:
            yield Case(f"{value} as {name}", "create_model", {**new, "lora_config": {name: value}},
                       field=f"lora_config.{name}")  # fmt: skip
    nothing = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    yield Case("nothing to train", "create_model", {**new, "lora_config": nothing}, field="lora_config")
    for value in (-1, 2**63, 1.5, "0", None, True):
        yield Case(
            f"{value} as number of a model", "create_model", {**new, "model_seq_id": value}, field="model_seq_id"
        )
        body = {"session_id": "$session", "sampling_session_seq_id": value, "base_model": "acme/tiny"}
        yield Case(f"{value} as number of a sampler", "create_sampling_session", body, field="sampling_session_seq_id")
    for config in (
        {"type": "sgd"},
        {"type": "torch.optim.SGD"},
        {"type": "dimuon", "version": 2},
        {"version": 1},
        "adamw",
    ):
        yield Case(
            f"{config} as optimizer", "create_model", {**new, "optimizer_config": config}, field="optimizer_config"
        )
    for value in (0, -1, 10, 2**40, 1.5, "3600", True):
        body = {"model_id": "$model", "path": "x", "ttl_seconds": value}
        yield Case(f"{value} s to live", "save_weights", body, field="ttl_seconds")
        where = "training_runs/$model/checkpoints/weights/kept/ttl"
        yield Case(f"{value} s to live from now", where, {"ttl_seconds": value}, method="PUT", field="ttl_seconds")


def protobuf() -> Iterator[Case]:
    """What JSON cannot say: numbers that are not finite, and bytes that do not fit their type."""
    place = "data[0].loss_fn_inputs"
    for value in (np.nan, np.inf, -np.inf):
        for name in ("advantages", "logprobs"):
            given = _Tensor(name, pb.DTYPE_FLOAT32, np.array([1, value], "<f4").tobytes())
            yield Case(f"{value} in {name} as protobuf", "forward_backward", content=given.body, headers=PROTOBUF,
                       field=f"{place}.{name}")  # fmt: skip
    for what, dtype, data, shape in (
        ("bytes that are no whole number", pb.DTYPE_FLOAT32, b"abc", ()),
        ("bytes of another size than the shape", pb.DTYPE_FLOAT32, b"abcd" * 2, (3,)),
        ("a shape that overflows", pb.DTYPE_FLOAT32, b"abcd" * 2, (2**62, 2**62)),
        ("a negative shape", pb.DTYPE_FLOAT32, b"abcd" * 2, (-2,)),
        ("bfloat16", pb.DTYPE_BFLOAT16, b"ab" * 2, ()),
        ("an unknown dtype", 99, b"abcd" * 2, ()),
        ("no bytes", pb.DTYPE_FLOAT32, b"", ()),
    ):
        given = _Tensor("advantages", dtype, data, shape)
        yield Case(f"{what} as protobuf", "forward_backward", content=given.body, headers=PROTOBUF,
                   field=f"{place}.advantages")  # fmt: skip


@dataclass(frozen=True)
class _Tensor:
    """A batch of ppo that is sound but for this tensor."""

    name: str
    dtype: int
    data: bytes
    shape: tuple[int, ...] = ()

    def body(self, targets: Targets) -> bytes:
        """For the attacker's model."""
        whole = pb.ForwardBackwardRequest(model_id=targets.model, loss_fn="ppo")
        datum = whole.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
        one = np.array([-1, -1], "<f4").tobytes()
        given: dict[str, tuple[int, bytes, tuple[int, ...]]] = {
            "target_tokens": (pb.DTYPE_INT64, np.array([6, 7], "<i8").tobytes(), ()),
            "logprobs": (pb.DTYPE_FLOAT32, one, ()),
            "advantages": (pb.DTYPE_FLOAT32, one, ()),
            self.name: (self.dtype, self.data, self.shape),
        }
        for name, (dtype, dense, shape) in given.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype, tensor.dense = dtype, dense  # type: ignore[assignment]
            tensor.shape.extend(shape)
        return whole.SerializeToString()
