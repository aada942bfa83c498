"""Traces for an OpenTelemetry collector: from the HTTP request over the queue and the turns to the durable outcome.

On only if the setting `otel_endpoint` is given. Spans say what was done and for how long. They hold ids of requests and
names of base models, never a key, an address with its query, a prompt or a result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics.events import METHODS, OTHER, route_of
from app.settings import SettingsError
from workers.tickets import TurnNote

_NS = 1_000_000_000
_PARENT = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Traced:
    root: Span
    queued: int = 0
    run: Span | None = None
    settle: Span | None = None
    inside: Context = field(default_factory=Context)


class Tracing:
    """Makes spans. An `app.services.observing.Observer`.

    Args:
        tracer: where spans go.
        close: sends what is left, and ends.
        now: nanoseconds since 1970.
    """

    def __init__(
        self, tracer: Tracer, close: Callable[[], None] = lambda: None, now: Callable[[], int] = time.time_ns
    ) -> None:
        self.tracer = tracer
        self.close = close
        self._now = now
        self._traced: dict[str, _Traced] = {}

    def accepted(self, request_id: str, kind: str, base_model: str, began: float) -> None:
        """See `Observer`."""
        start = int(began * _NS)
        traced = self._begin(request_id, kind, base_model, start)
        self._child("accept", traced.inside, start).end(self._now())

    def queued(self, request_id: str, kind: str, base_model: str) -> None:
        """See `Observer`."""
        traced = self._traced.get(request_id) or self._begin(request_id, kind, base_model, self._now())
        traced.queued = self._now()

    def started(self, request_id: str) -> None:
        """See `Observer`."""
        if (traced := self._traced.get(request_id)) is not None:
            now = self._now()
            if traced.run is None:
                self._child("queue", traced.inside, traced.queued).end(now)
            else:
                traced.run.set_attribute("tinsmith.lost", True)
                traced.run.end(now)
            traced.run = self._child("run", traced.inside, now)

    def turn(self, request_id: str, note: TurnNote) -> None:
        """See `Observer`. The pass of the worker (`micro_batch`) ends with its turn."""
        traced = self._traced.get(request_id)
        if traced is None or traced.run is None:
            return
        now = self._now()
        turn = self._child("turn", trace.set_span_in_context(traced.run, Context()), now - int(note.seconds * _NS))
        turn.set_attributes({"tinsmith.turn.tokens": note.tokens, "tinsmith.turn.operations": note.operations})
        inside = min(sum(note.parts.values()), note.seconds)
        batch = self._child("micro_batch", trace.set_span_in_context(turn, Context()), now - int(inside * _NS))
        batch.set_attributes({f"tinsmith.seconds.{part}": seconds for part, seconds in note.parts.items()})
        batch.end(now)
        turn.end(now)

    def computed(self, request_id: str) -> None:
        """See `Observer`. It is told again if the outcome could not be written the first time."""
        if (traced := self._traced.get(request_id)) is not None and traced.settle is None:
            now = self._now()
            if traced.run is not None:
                traced.run.end(now)
            traced.settle = self._child("settle", traced.inside, now)

    def settled(self, request_id: str, code: str | None) -> None:
        """See `Observer`."""
        if (traced := self._traced.pop(request_id, None)) is not None:
            if code is not None:
                traced.root.set_attribute("error.type", code)
                traced.root.set_status(Status(StatusCode.ERROR, code))
            self._end(traced)

    def dropped(self, request_id: str) -> None:
        """See `Observer`."""
        if (traced := self._traced.pop(request_id, None)) is not None:
            traced.root.set_attribute("tinsmith.dropped", True)
            self._end(traced)

    def _begin(self, request_id: str, kind: str, base_model: str, start: int) -> _Traced:
        about = {"tinsmith.kind": kind, "tinsmith.base_model": base_model, "tinsmith.request_id": request_id}
        root = self.tracer.start_span(f"operation {kind}", attributes=about, start_time=start)
        traced = _Traced(root, inside=trace.set_span_in_context(root, Context()))
        self._traced[request_id] = traced
        return traced

    def _child(self, name: str, inside: Context, start: int) -> Span:
        return self.tracer.start_span(name, context=inside, start_time=start)

    def _end(self, traced: _Traced) -> None:
        now = self._now()
        for span in (traced.settle or traced.run, traced.root):
            if span is not None:
                span.end(now)


class HttpSpans:
    """One span for each request, the current one of what is done in it. A caller's `traceparent` is its parent."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracer = tracing.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else OTHER
        parents = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
        parent = _PARENT.extract({"traceparent": parents[0]}, Context()) if len(parents) == 1 else Context()
        with self._tracer.start_as_current_span(
            method, parent, SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:

            async def send_and_see(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, send_and_see)
            finally:
                route = route_of(scope)
                span.update_name(f"{method} {route}")
                span.set_attributes({"http.request.method": method, "http.route": route})
                if "request_id" in scope.get("state", {}):
                    span.set_attribute("tinsmith.http_request_id", scope["state"]["request_id"])


class TraceIds(logging.Filter):
    """Adds `trace_id` to what is logged while a span is the current one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`. Lets everything pass."""
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            record.trace_id = trace.format_trace_id(context.trace_id)
        return True


def open_tracing(endpoint: str, *, processor: Callable[[Any], Any] | None = None) -> Tracing:
    """Spans to a collector at `endpoint` (OTLP over HTTP), in the background. `processor`: of the exporter; default: in
    batches.

    Raises:
        SettingsError: the extra `otel` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"otel_endpoint needs the extra otel: pip install 'tinsmith[otel]' ({error.name} is missing)"
        ) from None
    resource = Resource.create({"service.name": "tinsmith", "service.version": version("tinsmith")})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor((processor or BatchSpanProcessor)(exporter))
    return Tracing(provider.get_tracer("tinsmith"), provider.shutdown)
