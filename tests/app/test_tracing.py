"""Traces, as a collector gets them: who is whose child, what they hold, and what they must not hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pydantic import ValidationError

from app.logging import JsonFormatter
from app.settings import Settings
from app.tracing import TraceIds
from tests.app.conftest import MODEL, running
from tests.support.api import DATA, serving


class Collector:
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        keep = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                keep.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Span]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        scopes = [scope for request in requests for part in request.resource_spans for scope in part.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector on this machine."""
    one = Collector()
    yield one
    one.close()


def attributes(span: Span) -> dict[str, object]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


async def test_a_request_is_followed_from_the_socket_to_its_durable_outcome(
    tiny_settings: Callable[..., Settings], collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app.access")
    caplog.handler.addFilter(TraceIds())
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with serving(tiny_settings(otel_endpoint=collector.url)) as api:
        key = api.edge.app.state.dev_key
        model_id = await api.model()
        request = {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"}
        assert (await api.client.post("forward_backward?secret=in-query", json=request)).status_code == 400
        answer = await api.client.post("forward_backward", json=request, headers={"traceparent": parent})
        await api.result(answer.json()["request_id"])
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "heron"}], "max_tokens": 3}
        assert (await api.client.post("http://localhost/v1/chat/completions", json=chat)).status_code == 200
        small = await api.model(rank=2)
        saved = await api.do("save_weights", model_id=model_id, path="x")
        await api.fails("load_weights", model_id=small, path=saved["path"], optimizer=False)
    spans = collector.spans()
    by_id = {span.span_id: span for span in spans}
    [operation] = [span for span in spans if span.name == "operation forward_backward"]
    about = attributes(operation)
    assert (about["tinsmith.kind"], about["tinsmith.base_model"]) == ("forward_backward", MODEL)
    assert about["tinsmith.request_id"] == answer.json()["request_id"]
    http = by_id[operation.parent_span_id]
    assert http.name == "POST /api/v1/forward_backward"
    assert (http.trace_id, http.parent_span_id) == (bytes.fromhex("ab" * 16), bytes.fromhex("cd" * 8))
    assert attributes(http)["http.response.status_code"] == 200
    family = [span for span in spans if span.trace_id == http.trace_id]
    children = {span.name: span for span in family if span.parent_span_id == operation.span_id}
    assert set(children) == {"accept", "queue", "run", "settle"}
    in_order = [children[name] for name in ("accept", "queue", "run", "settle")]
    assert [span.start_time_unix_nano for span in in_order] == sorted(span.start_time_unix_nano for span in in_order)
    [turn] = [span for span in family if span.parent_span_id == children["run"].span_id]
    [batch] = [span for span in family if span.parent_span_id == turn.span_id]
    assert (turn.name, batch.name) == ("turn", "micro_batch")
    assert attributes(turn)["tinsmith.turn.tokens"] == 4
    assert any(name.startswith("tinsmith.seconds.") for name in attributes(batch))
    for span in family:
        assert (
            span.start_time_unix_nano
            <= span.end_time_unix_nano
            <= operation.end_time_unix_nano + (span is http) * 10**12
        )
    [failed] = [span for span in spans if span.name == "operation load_weights"]
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"]
    everything = b"".join(collector.bodies)
    assert any(span.name == "POST /v1/chat/completions" for span in spans)
    for secret in (key, "in-query", "secret=", "heron"):
        assert secret.encode() not in everything
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name == "app.access"]
    assert any("ab" * 16 in line and "forward_backward" in line for line in lines)


async def test_off_there_is_nothing_of_it(make_settings: Callable[..., Settings]) -> None:
    async with running(make_settings()) as edge:
        assert edge.app.state.tracing is None
        assert "HttpSpans" not in {getattr(middleware.cls, "__name__", None) for middleware in edge.app.user_middleware}
        assert not edge.app._native_telemetry.enabled(), "FastAPI's own spans hold queries"


@pytest.mark.parametrize("bad", ["collector:4318", "ftp://collector", "http://user:word@collector", "http://c/?a=b"])
def test_what_is_no_address_of_a_collector_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="otel_endpoint"):
        Settings(otel_endpoint=bad)
