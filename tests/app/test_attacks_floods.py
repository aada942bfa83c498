"""Bodies made to cost the server far more than their sender: millions of errors, keys and strings."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from app.codec import parse_request
from app.codec.json_text import MAX_KEYS
from schemas.errors import InvalidRequest
from schemas.http.base import RequestModel
from schemas.requests import CreateSessionRequest, ForwardBackwardRequest, SampleRequest, TelemetryRequest
from tests.app.conftest import Edge

MANY = 300_000
BAD_TOKENS = b"[" + b",".join([b"-1"] * MANY) + b"]"


@pytest.mark.parametrize(
    ("model", "body", "named"),
    [
        (SampleRequest, b'{"sampling_session_id":"a","prompt":' + BAD_TOKENS + b"}", "prompt.chunks[0].tokens[0]"),
        (
            ForwardBackwardRequest,
            b'{"model_id":"a","loss_fn":"x","data":[{"model_input":' + BAD_TOKENS + b',"loss_fn_inputs":{}}]}',
            "data[0].model_input.chunks[0].tokens[0]",
        ),
        (ForwardBackwardRequest, b'{"model_id":"a","loss_fn":"x","data":' + BAD_TOKENS + b"}", "data[0]"),
        (TelemetryRequest, b'{"session_id":"a","events":' + BAD_TOKENS + b"}", "events[0]"),
        (CreateSessionRequest, b'{"tags":' + BAD_TOKENS + b"}", "tags"),
    ],
)
def test_a_million_bad_items_cost_one_error(model: type[RequestModel], body: bytes, named: str) -> None:
    parse_request_fails(model, body[:40] + body[-40:])  # warm up
    tracemalloc.start()
    began = time.monotonic()
    error = parse_request_fails(model, body)
    seconds, (_, peak) = time.monotonic() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert named in error.message
    assert len(error.message) < 500
    assert seconds < 5
    assert peak < 40 * len(body)


@pytest.mark.parametrize("where", ['{"user_metadata":%s}', '{"reason":[[[%s]]]}', "%s"])
@pytest.mark.parametrize("repeat", [False, True])
def test_an_object_of_very_many_keys_is_refused_at_once(where: str, repeat: bool) -> None:
    names = [str(number) for number in range(MANY // 3)]
    names += names[-1:] if repeat else []
    body = (where % ("{" + ",".join(f'"{name}":1' for name in names) + "}")).encode()
    began = time.monotonic()
    error = parse_request_fails(CreateSessionRequest, body)
    assert time.monotonic() - began < 2
    assert f"more than {MAX_KEYS} keys" in error.message


def parse_request_fails(model: type[RequestModel], body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(body, model)
    return caught.value


@pytest.mark.parametrize(
    "route",
    ["create_session", "session_heartbeat", "telemetry", "client/config", "client/dynamic_config", "sessions/a/finish"],
)
async def test_every_route_reads_json_as_strictly(edge: Edge, route: str) -> None:
    async def refused(body: bytes, status: int = 400, encoding: str = "identity") -> str:
        answer = await edge.client.post(
            route, content=body, headers={"content-type": "application/json", "content-encoding": encoding}
        )
        assert answer.status_code == status, answer.text
        return str(answer.json()["detail"])

    assert "given twice" in await refused(b'{"sdk_version":"1","sdk_version":"2"}')
    assert "not valid JSON" in await refused(b'{"sdk_version":NaN}')
    assert "not valid JSON" in await refused(b"[" * 100_000)
    assert "not valid JSON" in await refused('{"sdk_version":"1"}'.encode("utf-16"))
    assert "zstd" in await refused(b'{"sdk_version":"1"}', encoding="zstd")
    assert "gzip" in await refused(b'{"sdk_version":"1"}', 415, encoding="gzip")
