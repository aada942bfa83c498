"""An application of Ray Serve that belongs to one base model: found if an earlier server left it, made if not.

Responsible for its life on the cluster. Not responsible for what it does, nor for the cluster
(`workers/ray/cluster.py`). Everything here blocks: for a thread.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray import serve
from ray.serve.api import RunTarget, run_many
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from schemas.errors import TinsmithError, Unavailable

_log = logging.getLogger("tinsmith.ray")

DEPLOY_SECONDS = 120.0
"""How long a process may take to start."""
_POLL_SECONDS = 0.25
_DESCRIBING = threading.Lock()
"""Whenever Serve makes the description of a deployment, of a new one or in the answer to how all are, it uses a global
register of modules: two threads at it spoil each other's."""
_UNPLACED = "to be scheduled"
"""What Serve says of a replica that no node has room for."""


def application_name(model: str, role: str = "") -> str:
    """The name of a base model's application: readable, and different for different names and roles."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()[:40]
    return f"tinsmith-{role + '-' if role else ''}{readable}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


class ServeApplication:
    """One application.

    Args:
        name: of the application.
        what: what it is, for people: "base model 'x'".
        made_for: what its deployment is made for. Its method `spec` answers with an equal value, or it is replaced.
        make: the application to deploy.
        shortage: says what is missing if no node takes a replica.
        patience: seconds in which it must run.
        place_patience: seconds after which a replica that no node has room for counts as a cluster that is too small.
        replaces: names of applications of another layout, which are deleted.
    """

    def __init__(
        self,
        name: str,
        what: str,
        *,
        made_for: object,
        make: Callable[[], Any],
        shortage: Callable[[], str],
        patience: float = DEPLOY_SECONDS,
        place_patience: float = DEPLOY_SECONDS,
        replaces: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._what = what
        self._made_for = made_for
        self._make = make
        self._shortage = shortage
        self._patience = patience
        self._place_patience = place_patience
        self._replaces = replaces

    def find_or_deploy(self) -> Any:
        """Its handle. Raises `Unavailable` if it cannot run here, and leaves nothing behind then."""
        for other in self._replaces:
            if _status_of(other) is not None:
                _log.warning("application %s of another layout is deleted", other)
                serve.delete(other)
        handle = self._existing()
        return self._deploy() if handle is None else handle

    def overview(self) -> ApplicationStatusOverview | None:
        """How it is; None if there is none, or not for long."""
        return _status_of(self.name)

    def delete(self) -> None:
        """End it and all its replicas."""
        serve.delete(self.name)

    def _existing(self) -> Any:
        """The application that another server made for the same in the same way, or None."""
        if self.overview() is None:
            return None
        handle = serve.get_app_handle(self.name)
        try:
            there = handle.spec.remote().result(timeout_s=DEPLOY_SECONDS)
        except Exception as error:
            _log.warning("the application of %s is made anew: %s", self._what, words(error))
            there = None
        if there == self._made_for:
            return handle
        self.delete()
        return None

    def _deploy(self) -> Any:
        with _DESCRIBING:
            target = RunTarget(self._make(), name=self.name, route_prefix=None)
            [handle] = run_many([target], wait_for_applications_running=False)
        try:
            self._wait_until_running()
        except TinsmithError:
            self.delete()
            raise
        return handle

    def _wait_until_running(self) -> None:
        began = time.monotonic()
        while True:
            overview = self.overview()
            status = None if overview is None else overview.status
            if status == ApplicationStatus.RUNNING:
                return
            message = "" if overview is None else " ".join(one.message for one in overview.deployments.values())
            if status == ApplicationStatus.DEPLOY_FAILED:
                _log.error("the application of %s cannot start: %s", self._what, message)
                raise Unavailable(f"{self._what} cannot be started on the Ray cluster: its replica fails")
            waited = time.monotonic() - began
            if waited > self._patience or (waited > self._place_patience and _UNPLACED in message):
                raise Unavailable(
                    f"{self._what} has no replica on the Ray cluster after {waited:.0f} s: {self._shortage()}"
                )
            time.sleep(_POLL_SECONDS)


def applications() -> dict[str, ApplicationStatusOverview]:
    """All applications on the cluster, by name."""
    with _DESCRIBING:
        return dict(serve.status().applications)


def _status_of(name: str) -> ApplicationStatusOverview | None:
    overview = applications().get(name)
    return None if overview is None or overview.status == ApplicationStatus.DELETING else overview


def words(error: BaseException) -> str:
    """The first line of an error: what Ray raises holds whole tracebacks."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
