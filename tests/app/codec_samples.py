"""Bodies for the codec tests, made by the SDK itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

PROTO = "application/x-protobuf"
JSON = "application/json"
RUN = "sess-1:train:0"


def tensor(values: Any, dtype: str) -> sdk.TensorData:
    return sdk.TensorData.from_numpy(np.asarray(values, dtype=dtype))


def datum(tokens: list[int], **inputs: sdk.TensorData) -> sdk.Datum:
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def sdk_body(
    data: list[sdk.Datum], loss_fn: str = "cross_entropy", config: Any = None, seq_id: int | None = 1
) -> bytes:
    request = ForwardBackwardRequest(ForwardBackwardInput(data, loss_fn, config), RUN, seq_id)  # type: ignore[arg-type]
    return forward_backward_request_to_proto(request).SerializeToString()


def simple_body(n: int = 4) -> bytes:
    tokens = list(range(n))
    return sdk_body([datum(tokens, target_tokens=tensor(tokens, "int64"), weights=tensor([1.0] * n, "float32"))])
