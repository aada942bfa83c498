"""Training bodies: what the SDK encodes is what the batch holds; every wrong tensor is refused by name."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as sdk

from app.codec import CodecLimits, decode_forward_backward, decode_operation, digest, encode_operation
from schemas.errors import InvalidRequest, UnsupportedMediaType
from schemas.operations import TrainBatch
from schemas.proto import tinker_public_pb2 as pb
from tests.app.codec_samples import JSON, PROTO, RUN, datum, sdk_body, simple_body, tensor


def _csr(dense: np.ndarray[Any, Any]) -> sdk.TensorData:
    listed = dense != 0
    return sdk.TensorData(
        data=dense[listed],
        dtype="int64" if dense.dtype.kind == "i" else "float32",
        shape=list(dense.shape),
        sparse_crow_indices=[0, *np.cumsum(listed.sum(axis=1)).tolist()],
        sparse_col_indices=np.nonzero(listed)[1].tolist(),
    )


def _same(a: TrainBatch, b: TrainBatch) -> None:
    assert (a.adapter_id, a.loss_fn, a.loss_config, a.backward) == (b.adapter_id, b.loss_fn, b.loss_config, b.backward)
    assert len(a.datums) == len(b.datums)
    for left, right in zip(a.datums, b.datums, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        assert left.inputs.keys() == right.inputs.keys()
        for name, values in left.inputs.items():
            assert values.dtype == right.inputs[name].dtype
            assert values.flags.writeable
            np.testing.assert_array_equal(values, right.inputs[name])


@st.composite
def _cases(draw: st.DrawFn) -> list[tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    cases = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(1, 5))
        shape = draw(st.sampled_from([(n,), (n, 1), (n, 4)]))
        cells = int(np.prod(shape))
        ids = st.sampled_from([0, 0, 1, 7, 2**31 - 1])
        floats = st.sampled_from([0.0, 0.0, 1.0, -2.5, 1e-30])
        targets = np.array(draw(st.lists(ids, min_size=cells, max_size=cells)), dtype=np.int64).reshape(shape)
        weights = np.array(draw(st.lists(floats, min_size=cells, max_size=cells)), dtype=np.float32).reshape(shape)
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
        cases.append((tokens, targets, weights))
    return cases


@settings(max_examples=60, deadline=None)
@given(_cases(), st.booleans(), st.one_of(st.none(), st.integers(1, 2**31 - 1)))
def test_dense_and_sparse_bodies_of_the_sdk_round_trip(cases: Any, sparse: bool, seq_id: int | None) -> None:
    data = []
    for tokens, targets, weights in cases:
        pack = _csr if sparse and targets.ndim == 2 else sdk.TensorData.from_numpy
        data.append(datum(tokens, target_tokens=pack(targets), weights=pack(weights)))
    parsed = decode_forward_backward(sdk_body(data, seq_id=seq_id), PROTO)
    assert (parsed.model_id, parsed.seq_id, parsed.forward_only) == (RUN, seq_id, False)
    for found, (tokens, targets, weights) in zip(parsed.batch.datums, cases, strict=True):
        assert found.tokens.dtype == np.int64
        np.testing.assert_array_equal(found.tokens, tokens)
        np.testing.assert_array_equal(found.inputs["target_tokens"], targets)
        np.testing.assert_array_equal(found.inputs["weights"], weights)
    stored = encode_operation("forward_backward", parsed.batch)
    again = decode_operation("forward_backward", stored)
    assert isinstance(again, TrainBatch)
    _same(parsed.batch, again)
    assert encode_operation("forward_backward", again) == stored


def test_the_sdk_sparsifies_by_itself_and_is_understood() -> None:
    torch = pytest.importorskip("torch")
    targets = torch.zeros(6, 4, dtype=torch.int64)
    targets[5] = torch.tensor([1, 2, 3, 4])
    weights = torch.zeros(6, 4)
    weights[5] = 0.25
    built = sdk.Datum(
        model_input=sdk.ModelInput.from_ints(list(range(6))),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    body = sdk_body([built])
    assert pb.ForwardBackwardRequest.FromString(body).data[0].loss_fn_inputs["weights"].HasField("sparse_csr")
    found = decode_forward_backward(body, PROTO).batch.datums[0].inputs
    np.testing.assert_array_equal(found["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(found["weights"], weights.numpy())


FLAT = {"model_id": RUN, "seq_id": 1, "loss_fn": "cross_entropy"}
DATUM = {"model_input": [0, 1, 2], "loss_fn_inputs": {"target_tokens": [1, 2, 3], "weights": [1, 0.5, -1]}}
CHUNKED = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [0]}, {"tokens": [1, 2]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1, 0.5, -1], "dtype": "float32"},
    },
}


@pytest.mark.parametrize(
    "body",
    [
        {**FLAT, "data": [DATUM]},
        {**FLAT, "datums": [CHUNKED]},
        {"model_id": RUN, "seq_id": 1, "forward_backward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}},
    ],
)
def test_every_json_form_means_what_the_protobuf_means(body: dict[str, Any]) -> None:
    wire = sdk_body(
        [datum([0, 1, 2], target_tokens=tensor([1, 2, 3], "int64"), weights=tensor([1, 0.5, -1], "float32"))]
    )
    parsed = decode_forward_backward(orjson.dumps(body), "application/json; charset=utf-8")
    expected = decode_forward_backward(wire, PROTO)
    _same(parsed.batch, expected.batch)
    assert (parsed.model_id, parsed.seq_id, parsed.forward_only) == (RUN, 1, False)
    kinds = [digest(encode_operation("forward_backward", p.batch)) for p in (parsed, expected)]
    assert kinds[0] == kinds[1]


def test_json_sparse_and_nested_tensors() -> None:
    sparse = {"data": [7], "shape": [2, 3], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [2]}
    inputs = {"target_tokens": sparse, "weights": [[0, 0, 0], [0, 0, 1]]}
    body = {**FLAT, "data": [{"model_input": [0, 1], "loss_fn_inputs": inputs}]}
    found = decode_forward_backward(orjson.dumps(body), JSON).batch.datums[0].inputs
    assert found["target_tokens"].tolist() == [[0, 0, 0], [0, 0, 7]]
    assert found["weights"].tolist() == [[0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "body",
    [
        {"model_id": RUN, "forward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}},
        {**FLAT, "data": [DATUM], "forward_only": True},
        {**FLAT, "data": [DATUM], "type": "forward"},
    ],
)
def test_forward_only_forms(body: dict[str, Any]) -> None:
    parsed = decode_forward_backward(orjson.dumps(body), JSON)
    assert parsed.forward_only
    assert not parsed.batch.backward


def test_the_forward_route_wants_no_gradient() -> None:
    assert not decode_forward_backward(simple_body(), PROTO, forward=True).batch.backward
    body = orjson.dumps({**FLAT, "data": [DATUM], "forward_only": False})
    with pytest.raises(InvalidRequest, match="forward"):
        decode_forward_backward(body, JSON, forward=True)


def test_missing_weights_are_ones_and_integers_widen() -> None:
    parsed = decode_forward_backward(sdk_body([datum([0, 1], target_tokens=tensor([1, 2], "int64"))]), PROTO)
    assert parsed.batch.datums[0].inputs["weights"].tolist() == [1.0, 1.0]
    body = sdk_body([datum([0, 1], target_tokens=tensor([1, 2], "int64"), weights=tensor([1, 0], "int64"))])
    weights = decode_forward_backward(body, PROTO).batch.datums[0].inputs["weights"]
    assert weights.dtype == np.float32


def test_config_prefers_v2_and_spans_are_ignored() -> None:
    policy = {"target_tokens": tensor([1], "int64"), "logprobs": tensor([-1], "float32")}
    message = pb.ForwardBackwardRequest.FromString(
        sdk_body([datum([0], **policy, advantages=tensor([1], "float32"))], "ppo", {"clip_high_threshold": 1.5})
    )
    message.loss_fn_config["clip_high_threshold"] = 9.0
    message.data[0].model_input_spans.add().prompt_tokens.length = 1
    batch = decode_forward_backward(message.SerializeToString(), PROTO).batch
    assert batch.loss_config == {"clip_high_threshold": 1.5}
    del message.loss_fn_config_v2["clip_high_threshold"]
    assert decode_forward_backward(message.SerializeToString(), PROTO).batch.loss_config["clip_high_threshold"] == 9.0


POLICY = {"target_tokens": [1, 2, 3], "logprobs": [-1, -1, -1], "advantages": [1, 1, 1]}


def _json_body(inputs: dict[str, Any], loss_fn: str = "cross_entropy", **more: Any) -> bytes:
    data = [{"model_input": [0, 1, 2], "loss_fn_inputs": inputs}]
    return orjson.dumps({"model_id": RUN, "data": data, "loss_fn": loss_fn, **more})


def _spans(targets: list[tuple[str, int]], inputs: list[tuple[str, int]] | None = None) -> bytes:
    """A body of stable_reinforce with these runs over its three positions."""

    def listed(runs: list[tuple[str, int]]) -> list[dict[str, Any]]:
        return [{"type": kind, "sequence_id": "s", "length": length} for kind, length in runs]

    body = orjson.loads(_json_body(POLICY, "stable_reinforce"))
    body["data"][0] |= {"loss_fn_input_spans": listed(targets), "model_input_spans": listed(inputs or targets)}
    return orjson.dumps(body)


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (_json_body(POLICY, "stable_reinforce", loss_fn_config={"beta": 1}), "loss_fn_config.beta", "kl_coeff"),
        (_spans([("prompt_tokens", 1), ("sampled_tokens", 1)]), "data[0].model_input_spans", "all 3"),
        (_spans([("sampled_tokens", 2)], [("prompt_tokens", 3)]), "data[0].loss_fn_input_spans", "all 3"),
        (_spans([("model_tokens", 3)]), "data[0].model_input_spans", "sampled_tokens"),
        (_spans([("sampled_tokens", -3)]), "data[0].model_input_spans", "length"),
        (_json_body(POLICY, "grpo"), "loss_fn", "cross_entropy"),
        (_json_body(POLICY, "ppo", loss_fn_config={"clip": 1.0}), "loss_fn_config.clip", "clip_high_threshold"),
        (_json_body(POLICY, "ppo", loss_fn_config={"clip_low_threshold": "0.8"}), "loss_fn_config", "number"),
        (_json_body(POLICY, "ppo", loss_fn_config={"clip_low_threshold": 5}), "loss_fn_config.clip_low", "above"),
        (_json_body(POLICY, "ppo", loss_fn_config={"clip_low_threshold": -1}), "loss_fn_config.clip_low", "at least 0"),
        (_json_body({"target_tokens": [1, 2, 3]}, "ppo"), "data[0].loss_fn_inputs", "advantages, logprobs"),
        (_json_body({**POLICY, "mask": [1, 1, 1]}, "ppo"), "data[0].loss_fn_inputs.mask", "accepted: advantages"),
        (_json_body({**POLICY, "clip_low_threshold": [0, 2, 0]}, "ppo"), "clip_low_threshold", "every position"),
        (_json_body({"target_tokens": [1, 2]}), "target_tokens", "[3] or [3, K]"),
        (_json_body({**POLICY, "target_tokens": [[1], [2], [3]]}, "ppo"), "target_tokens", "takes [3]"),
        (_json_body({"target_tokens": [1, 2, 3], "weights": [1, 1]}), "weights", "need [3]"),
        (_json_body({"target_tokens": [1.0, 2.0, 3.0]}), "target_tokens", "integers"),
        (_json_body({"target_tokens": [1, 2, -3]}), "target_tokens", "-3 at index 2"),
        (_json_body({"target_tokens": [1, 2, 2**31]}), "target_tokens", "index 2"),
        (_json_body({"target_tokens": [1, 2, 3], "weights": [1, 1e39, 1]}), "weights", "index 1"),
        (_json_body({"target_tokens": [1, 2, True]}), "target_tokens", "true/false"),
        (_json_body({"target_tokens": [1, 2, "3"]}), "target_tokens", "text"),
        (_json_body({"target_tokens": [1, 2, None]}), "target_tokens", "null"),
        (_json_body({"target_tokens": [[1, 2], [3]]}), "target_tokens", "ragged"),
        (_json_body({"target_tokens": [[[1]], [[2]], [[3]]]}), "target_tokens", "at most 2 dimensions"),
        (_json_body({"target_tokens": "abc"}), "target_tokens", ""),
        (_json_body({"target_tokens": {"data": [1, 2, 3], "dtype": "bfloat16"}}), "dtype", "float32"),
        (_json_body({"target_tokens": {"data": [1, 2, 3.5], "dtype": "int64"}}), "target_tokens", "fractions"),
        (_json_body({"target_tokens": {"data": [1, 2, 3], "shape": [0, 2**63]}}), "target_tokens", "shape"),
        (_json_body({"target_tokens": {"data": [1], "sparse_crow_indices": [0]}}), "target_tokens", "both or neither"),
        (b'{"model_id": "a/b", "data": [], "loss_fn": "ppo"}', "model_id", ""),
        (orjson.dumps({**FLAT, "data": []}), "data", "at least 1"),
        (orjson.dumps({**FLAT, "data": [DATUM], "datums": [DATUM]}), None, "once"),
        (orjson.dumps({**FLAT}), None, "none of them"),
        (orjson.dumps({**FLAT, "seq_id": 0, "data": [DATUM]}), "seq_id", "greater than or equal to 1"),
        (orjson.dumps({**FLAT, "data": [{**DATUM, "model_input": []}]}), "data[0].model_input", "at least one token"),
        (
            orjson.dumps({**FLAT, "data": [{**DATUM, "model_input": {"chunks": [{"type": "image"}]}}]}),
            "data[0].model_input.chunks[0]",
            "text-only",
        ),
    ],
)
def test_wrong_json_is_refused_by_name(body: bytes, field: str | None, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_forward_backward(body, JSON)
    assert said in caught.value.message
    assert field is None or field in (caught.value.field or "")


def _changed(change: Any) -> bytes:
    n = 3
    weights = np.array([[0, 1, 2], [0, 0, 0], [3, 0, 0]], dtype=np.float32)
    body = sdk_body([datum([0] * n, target_tokens=_csr(weights.astype(np.int64)), weights=_csr(weights))])
    message = pb.ForwardBackwardRequest.FromString(body)
    change(message, message.data[0].loss_fn_inputs["weights"])
    return message.SerializeToString()


def _set_csr(name: str, values: list[int]) -> Any:
    return lambda message, weights: setattr(weights.sparse_csr, name, np.array(values, dtype="<i8").tobytes())


def _set_shape(*shape: int) -> Any:
    def change(message: Any, weights: Any) -> None:
        del weights.shape[:]
        weights.shape.extend(shape)

    return change


def _set(**fields: Any) -> Any:
    def change(message: Any, weights: Any) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set_csr("crow_indices", [0, 2, 2]), "3 rows need 4"),
        (_set_csr("crow_indices", [1, 2, 2, 3]), "from 1 to 3"),
        (_set_csr("crow_indices", [0, 2, 2, 4]), "from 0 to 4"),
        (_set_csr("crow_indices", [0, 3, 2, 3]), "must not fall"),
        (_set_csr("crow_indices", [0, -(2**63), 2**63 - 1, 3]), "must not fall"),
        (_set_csr("col_indices", [1, 2]), "2 column indices"),
        (_set_csr("col_indices", [1, 3, 0]), "0 to 2"),
        (_set_csr("col_indices", [-1, 2, 0]), "0 to 2"),
        (_set_csr("col_indices", [2, 1, 0]), "must rise"),
        (_set_csr("col_indices", [1, 1, 0]), "must rise"),
        (_set_shape(3), "[rows, columns]"),
        (_set_shape(3, -3), "[rows, columns]"),
        (_set_shape(3, 2**62), "room for"),
        (_set_shape(2**62, 3), "rows need"),
        (lambda message, weights: setattr(weights, "dtype", pb.DTYPE_BFLOAT16), "DTYPE_BFLOAT16"),
        (lambda message, weights: setattr(weights, "dtype", 99), "99"),
        (lambda message, weights: weights.ClearField("sparse_csr"), "no values"),
        (lambda message, weights: setattr(weights, "dense", b"abc"), "3 bytes"),
        (lambda message, weights: setattr(weights, "dense", b"abcd"), "shape"),
        (lambda message, weights: message.data[0].model_input.add().image.SetInParent(), "text-only"),
        (lambda message, weights: message.data[0].model_input.add(), "none"),
        (lambda message, weights: setattr(message.data[0].model_input[0].encoded_text, "tokens", b"12345"), "5 bytes"),
        (lambda message, weights: message.data[0].ClearField("model_input"), "no tokens"),
        (lambda message, weights: message.ClearField("data"), "0 examples"),
        (_set(seq_id=-1), "-1"),
        (_set(model_id=""), "model_id"),
        (_set(model_id="x\n"), "model_id"),
        (_set(loss_fn="nope"), "cross_entropy"),
        (lambda message, weights: message.loss_fn_config_v2["mode"].SetInParent(), "mode"),
        (lambda message, weights: message.MergeFromString(b"\xfa\x3f\x01x"), "does not know"),
    ],
)
def test_wrong_protobuf_is_refused(change: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_forward_backward(_changed(change), PROTO)
    assert said in caught.value.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e300])
def test_parameters_of_a_loss_are_finite(value: float) -> None:
    with pytest.raises(InvalidRequest, match="clip_high_threshold"):
        decode_forward_backward(_changed(_config(value)), PROTO)


def _config(value: float) -> Any:
    def change(message: Any, weights: Any) -> None:
        message.loss_fn = "ppo"
        message.loss_fn_config["clip_high_threshold"] = value

    return change


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    body = sdk_body([datum([0, 1], target_tokens=tensor([1, 2], "int64"), weights=tensor([1, value], "float32"))])
    with pytest.raises(InvalidRequest, match="index 1"):
        decode_forward_backward(body, PROTO)


def test_limits_and_media_types() -> None:
    two = [datum([0], target_tokens=tensor([1], "int64"))] * 2
    with pytest.raises(InvalidRequest, match="1 to 1"):
        decode_forward_backward(sdk_body(two), PROTO, CodecLimits(max_datums=1))
    with pytest.raises(InvalidRequest, match="at most 3"):
        decode_forward_backward(simple_body(4), PROTO, CodecLimits(max_datum_tokens=3))
    with pytest.raises(InvalidRequest, match="room"):
        decode_forward_backward(simple_body(4), PROTO, CodecLimits(max_tensor_cells=7))
    with pytest.raises(UnsupportedMediaType, match="text/plain"):
        decode_forward_backward(simple_body(), "text/plain")


def test_three_megabytes_are_decoded_in_bulk() -> None:
    n, count = 1000, 190
    one = datum(list(range(n)), target_tokens=tensor(np.arange(n), "int64"), weights=tensor(np.ones(n), "float32"))
    body = sdk_body([one] * count)
    assert len(body) > 3_000_000
    text = orjson.dumps(
        {
            **FLAT,
            "data": [
                {
                    "model_input": list(range(n)),
                    "loss_fn_inputs": {"target_tokens": list(range(n)), "weights": [1.25] * n},
                }
            ]
            * count,
        }
    )

    def fastest(data: bytes, kind: str) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time()
            decode_forward_backward(data, kind)
            times.append(time.process_time() - begin)
        return min(times)

    # Far above what it takes (10 ms; 150 ms), far below what a loop over the numbers would (570 000 of them).
    assert fastest(body, PROTO) < 0.1
    assert fastest(text, JSON) < 0.6
