"""The way from the edge to a base model's deployment: one application of Ray Serve for each base model.

Responsible for making the application, for finding one that an earlier server left, and for carrying bytes. What blocks
runs in a thread. Not responsible for the cluster (`workers/ray/cluster.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.api import RunTarget, run_many
from ray.serve.schema import ApplicationStatus

from schemas.errors import EngineFailure, TinsmithError, Unavailable
from workers.ray.deployment import ReplicaSpec, RuntimeReplica, actor_options
from workers.remote.link import LinkBroken

_log = logging.getLogger("tinsmith.ray")

DEPLOY_SECONDS = 120.0
"""How long a replica may take to start; it loads the base model only after that."""
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 30.0
"""A transfer to a replica that takes longer than this is repeated."""
MAX_ONGOING = 1000


def application_name(model: str) -> str:
    """The name of a base model's application: readable, and different for different names."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()[:40]
    return f"tinsmith-{readable}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


class RayLink:
    """Implements `workers.remote.Link` on Ray Serve."""

    def __init__(self, spec: ReplicaSpec, *, deploy_timeout: float = DEPLOY_SECONDS) -> None:
        self._spec = spec
        self._model = spec.worker.model
        self._name = application_name(self._model)
        self._deploy_timeout = deploy_timeout
        self._handle: Any = None

    async def open(self) -> None:
        """See `Link.open`."""
        try:
            self._handle = await asyncio.to_thread(self._find_or_deploy)
        except TinsmithError:
            raise
        except Exception as error:
            _log.exception("base model %s cannot be deployed", self._model)
            raise EngineFailure(f"base model {self._model!r} cannot be deployed on Ray") from error

    async def events(self, hello: bytes) -> AsyncIterator[bytes]:
        """See `Link.events`."""
        answers = self._handle.options(stream=True).events.remote(hello)
        try:
            async for data in answers:
                yield data
        except Exception as error:  # Ray's errors have no common root; another try shows whether it was a passing one
            raise LinkBroken(_words(error)) from error
        finally:
            answers.cancel()
        raise LinkBroken("the stream ended")

    async def send(self, frame: bytes) -> bool:
        """See `Link.send`."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                known: bool = await self._handle.send.remote(frame)
        except TimeoutError as error:
            raise LinkBroken(f"no answer within {_ANSWER_SECONDS:g} s") from error
        except Exception as error:
            raise LinkBroken(_words(error)) from error
        return known

    async def lost(self) -> TinsmithError | None:
        """See `Link.lost`. An application that somebody deleted is made again."""
        try:
            status = await asyncio.to_thread(self._status)
            if status is None:
                self._handle = await asyncio.to_thread(self._find_or_deploy)
        except TinsmithError as error:
            return error
        except Exception as error:  # the controller is being replaced, or the cluster is gone: the next try shows it
            _log.warning("Ray Serve does not answer for base model %s: %s", self._model, _words(error))
            await asyncio.sleep(1.0)
        return None

    async def close(self) -> None:
        """See `Link.close`."""
        if self._handle is None:
            return
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                if await self._handle.edges.remote() == 0:
                    await asyncio.to_thread(serve.delete, self._name)
        except Exception as error:
            _log.warning("the application of base model %s stays on the cluster: %s", self._model, _words(error))

    # -- in a thread -------------------------------------------------------------------------------------------------
    def _find_or_deploy(self) -> Any:
        handle = self._existing()
        return self._deploy() if handle is None else handle

    def _existing(self) -> Any:
        """The application that another server made for the same base model in the same way, or None."""
        if self._status() is None:
            return None
        handle = serve.get_app_handle(self._name)
        try:
            there: ReplicaSpec | None = handle.spec.remote().result(timeout_s=self._deploy_timeout)
        except Exception as error:
            _log.warning("the application of base model %s is made anew: %s", self._model, _words(error))
            there = None
        if there == self._spec:
            return handle
        serve.delete(self._name)
        return None

    def _deploy(self) -> Any:
        deployment = serve.deployment(RuntimeReplica).options(
            name="runtime",
            num_replicas=1,
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options=actor_options(),
            health_check_period_s=5,
            health_check_timeout_s=30,
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=10,
        )
        target = RunTarget(deployment.bind(self._spec), name=self._name, route_prefix=None)
        [handle] = run_many([target], wait_for_applications_running=False)
        try:
            self._wait_until_running()
        except TinsmithError:
            serve.delete(self._name)
            raise
        return handle

    def _wait_until_running(self) -> None:
        deadline = time.monotonic() + self._deploy_timeout
        while True:
            status = self._status()
            if status == ApplicationStatus.RUNNING:
                return
            if status == ApplicationStatus.DEPLOY_FAILED:
                raise Unavailable(f"base model {self._model!r} cannot be started on the Ray cluster: its replica fails")
            if time.monotonic() > deadline:
                raise Unavailable(self._no_place())
            time.sleep(_POLL_SECONDS)

    def _status(self) -> ApplicationStatus | None:
        overview = serve.status().applications.get(self._name)
        if overview is None or overview.status == ApplicationStatus.DELETING:
            return None
        return overview.status

    def _no_place(self) -> str:
        return (
            f"base model {self._model!r} has no replica on the Ray cluster after {self._deploy_timeout:g} s: no node "
            "takes new processes"
        )


def _words(error: BaseException) -> str:
    """The first line of an error: what Ray raises holds whole tracebacks."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
