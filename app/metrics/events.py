"""What is counted as it happens: HTTP requests, operations on their way, transactions of the database.

Labels are few and bounded: templates of routes, kinds of operations, error codes, names of base models. Never an id of
a project, a session, a run or a request. Not responsible for what can be read at any time (`state.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.tickets import TurnNote

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
"""A method that HTTP does not know, or a path that no route has: a caller can make up any number of them."""
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


@dataclass(slots=True)
class _Watched:
    kind: str
    base_model: str
    queued: float
    started: float | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted since the start: answered requests, operations that succeeded by kind, and that failed."""

    requests: int
    finished: dict[str, int]
    failed: int


class Events:
    """The counters of one server. An `app.services.observing.Observer`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self.registry = registry = CollectorRegistry()
        what = ("base_model", "kind")
        self.labels: dict[str, tuple[str, ...]] = {
            "tinsmith_http_requests": ("method", "route", "status"),
            "tinsmith_http_request_seconds": ("method", "route"),
            "tinsmith_operations_accepted": what,
            "tinsmith_operations_finished": what,
            "tinsmith_operations_failed": (*what, "code"),
            "tinsmith_operation_wait_seconds": what,
            "tinsmith_operation_run_seconds": what,
        }
        """Labels by metric."""
        self.requests = Counter(
            "tinsmith_http_requests",
            "Requests that were answered; status 0: the client left before.",
            self.labels["tinsmith_http_requests"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "tinsmith_http_request_seconds",
            "From the head of a request to the end of its answer. Polls for results are held on purpose.",
            self.labels["tinsmith_http_request_seconds"],
            buckets=_FAST,
            registry=registry,
        )
        self.open_requests = Gauge(
            "tinsmith_http_requests_in_progress", "Requests that are not answered yet.", registry=registry
        )
        self._accepted = Counter(
            "tinsmith_operations_accepted", "Operations that were made durable.", what, registry=registry
        )
        self._finished = Counter(
            "tinsmith_operations_finished", "Operations whose success is durable.", what, registry=registry
        )
        self._failed = Counter(
            "tinsmith_operations_failed",
            "Operations whose failure is durable, by error code (docs/errors.md).",
            self.labels["tinsmith_operations_failed"],
            registry=registry,
        )
        self._wait_seconds = Histogram(
            "tinsmith_operation_wait_seconds",
            "From the queue of the base model to the beginning of the work.",
            what,
            buckets=_SLOW,
            registry=registry,
        )
        self._run_seconds = Histogram(
            "tinsmith_operation_run_seconds",
            "From the beginning of the work to the durable outcome.",
            what,
            buckets=_SLOW,
            registry=registry,
        )
        self._commit_seconds = Histogram(
            "tinsmith_database_commit_seconds",
            "One transaction of the database's writer, to the disk.",
            buckets=_FAST,
            registry=registry,
        )
        self._writes = Counter(
            "tinsmith_database_writes", "Writes in these transactions; several share one.", registry=registry
        )

    def totals(self) -> Totals:
        """What there is now."""
        finished: dict[str, int] = {}
        for labels, count in _counted(self._finished):
            finished[labels["kind"]] = finished.get(labels["kind"], 0) + count
        requests, failed = (sum(count for _, count in _counted(each)) for each in (self.requests, self._failed))
        return Totals(requests, finished, failed)

    # -- operations ------------------------------------------------------------------------------------------------
    def accepted(self, request_id: str, kind: str, base_model: str, began: float) -> None:
        """See `Observer`."""
        self._accepted.labels(base_model, kind).inc()

    def queued(self, request_id: str, kind: str, base_model: str) -> None:
        """See `Observer`."""
        self._watched[request_id] = _Watched(kind, base_model, self._clock())

    def started(self, request_id: str) -> None:
        """See `Observer`. Only the first beginning counts."""
        one = self._watched.get(request_id)
        if one is not None and one.started is None:
            one.started = self._clock()
            self._wait_seconds.labels(one.base_model, one.kind).observe(one.started - one.queued)

    def turn(self, request_id: str, note: TurnNote) -> None:
        """See `Observer`."""

    def computed(self, request_id: str) -> None:
        """See `Observer`."""

    def settled(self, request_id: str, code: str | None) -> None:
        """See `Observer`."""
        one = self._watched.pop(request_id, None)
        if one is None:
            return
        if one.started is not None:
            self._run_seconds.labels(one.base_model, one.kind).observe(self._clock() - one.started)
        if code is None:
            self._finished.labels(one.base_model, one.kind).inc()
        else:
            self._failed.labels(one.base_model, one.kind, code).inc()

    def dropped(self, request_id: str) -> None:
        """See `Observer`."""
        self._watched.pop(request_id, None)

    # -- the database ----------------------------------------------------------------------------------------------
    def committed(self, writes: int, seconds: float) -> None:
        """A transaction is on the disk."""
        self._commit_seconds.observe(seconds)
        self._writes.inc(writes)


def _counted(counter: Counter) -> Iterator[tuple[dict[str, str], int]]:
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, int(sample.value)


class HttpEvents:
    """Counts requests. Stands outside of everything that may answer one."""

    def __init__(self, app: ASGIApp, *, events: Events, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app = app
        self._events = events
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = self._clock(), 0

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._events.open_requests.inc()
        try:
            await self._app(scope, receive, send_and_see)
        finally:
            self._events.open_requests.dec()
            method = scope["method"] if scope["method"] in METHODS else OTHER
            route = route_of(scope)
            self._events.requests.labels(method, route, str(status)).inc()
            self._events.request_seconds.labels(method, route).observe(self._clock() - began)


def route_of(scope: Scope) -> str:
    """The template of the route that a request went to, with the prefix of its router."""
    template = getattr(scope.get("route"), "path_format", None)
    if not isinstance(template, str):
        return OTHER
    values = {name: str(value) for name, value in scope.get("path_params", {}).items()}
    try:
        own = template.format(**values)
    except KeyError:
        return OTHER
    path: str = scope["path"]
    return path.removesuffix(own) + template if path.endswith(own) else OTHER
