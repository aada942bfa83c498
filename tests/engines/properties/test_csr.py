"""A CSR body is resolved at the edge: what reaches the engine is the dense batch, and trains with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tinker import types as sdk

from app.codec import decode_forward_backward
from tests.app.codec_samples import PROTO, datum, sdk_body
from tests.engines.properties.conftest import Labs
from tests.engines.properties.data import SMALL, VOCAB
from tests.engines.properties.lab import bits, gradient
from tests.engines.properties.turns import Bits, run


def csr(dense: np.ndarray[Any, Any]) -> sdk.TensorData:
    """Only the cells that are not zero."""
    listed = dense != 0
    return sdk.TensorData(
        data=dense[listed],
        dtype="int64" if dense.dtype.kind == "i" else "float32",
        shape=list(dense.shape),
        sparse_crow_indices=[0, *np.cumsum(listed.sum(axis=1)).tolist()],
        sparse_col_indices=np.nonzero(listed)[1].tolist(),
    )


@SMALL
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=3), seed=st.integers(0, 999)
)
def test_a_sparse_body_trains_as_the_dense_one(labs: Labs, shapes: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    bodies: dict[str, list[sdk.Datum]] = {"dense": [], "sparse": []}
    for n, columns in shapes:
        tokens = rng.integers(0, VOCAB, n).tolist()
        weights = (rng.normal(size=(n, columns)) * (rng.random((n, columns)) < 0.4)).astype(np.float32)
        targets = rng.integers(0, VOCAB, (n, columns)) * (weights != 0)
        for form, pack in (("dense", sdk.TensorData.from_numpy), ("sparse", csr)):
            bodies[form].append(datum(tokens, target_tokens=pack(targets), weights=pack(weights)))
    batches = {
        form: replace(decode_forward_backward(sdk_body(data), PROTO).batch, adapter_id=form)
        for form, data in bodies.items()
    }
    for one, other in zip(batches["dense"].datums, batches["sparse"].datums, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert one.inputs.keys() == other.inputs.keys()
        for name, values in one.inputs.items():
            assert values.dtype == other.inputs[name].dtype
            np.testing.assert_array_equal(values, other.inputs[name])
    with labs("llama").adapters({"dense": "all", "sparse": "all"}) as engine:
        outcomes = run(engine, batches)
        assert Bits.of(outcomes["dense"]) == Bits.of(outcomes["sparse"])
        assert bits(gradient(engine, "dense")) == bits(gradient(engine, "sparse"))
