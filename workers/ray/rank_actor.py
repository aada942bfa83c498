"""One rank of a worker group as a Ray actor: the counterpart of `workers/child.py`.

`workers/ray/gang.py` makes an actor of the class and says which of its methods answer while work runs. Calls and
loading run one after the other, in the order in which they were made.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import warnings
from dataclasses import dataclass

import ray

from schemas.base_model_info import BaseModelInfo
from schemas.errors import EngineFailure, TinsmithError, Unavailable
from workers.build import resolve_builder
from workers.dispatch import invoke
from workers.faults import to_tinsmith_error
from workers.messages import Answer, Call
from workers.spec import WorkerSpec

_log = logging.getLogger("tinsmith.worker")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a rank runs: its process id, its node's address, and a port that was free there a moment ago."""

    pid: int
    address: str
    port: int


class RankActor:
    """One worker in a process that Ray has started. Only rank 0 sends values: they are the answers."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
        )
        # Arrays lie in the object store, which other ranks read too. Nobody writes to arguments, but torch warns.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._worker: object | None = None
        self._progress: str | None = None

    # -- one after the other ---------------------------------------------------------------------------------------
    def site(self) -> Site:
        """Where this rank runs, for the others to meet it there."""
        address: str = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind(("", 0))
            return Site(os.getpid(), address, probe.getsockname()[1])

    def load(self, spec: WorkerSpec, environment: dict[str, str]) -> BaseModelInfo | TinsmithError:
        """Build the worker; `environment` is what the ranks find each other by. An error is returned as itself, for
        Ray would wrap one that is raised."""
        os.environ.update(environment)
        try:
            worker = resolve_builder(spec)(spec, self._note_progress)
            info: BaseModelInfo = worker.info  # type: ignore[attr-defined]
        except TinsmithError as error:
            return error
        except Exception as error:
            _log.error("base model %s cannot be loaded", spec.model, exc_info=error)
            return Unavailable(
                f"base model {spec.model!r} cannot be loaded ({type(error).__name__})",
                hint="the log of the rank's actor has the details",
            )
        self._worker = worker
        return info

    def call(self, call: Call) -> Answer:
        """Run a registered method."""
        try:
            if self._worker is None:
                raise EngineFailure("the worker has not been loaded")
            value = invoke(self._worker, call.method, call.args, call.kwargs)
            return Answer(call.call_id, value if self._rank == 0 else None)
        except Exception as error:
            return Answer(call.call_id, error=to_tinsmith_error(error, call.method))

    def finished(self) -> None:
        """Comes back when every call that was made before has ended."""

    # -- while work runs -------------------------------------------------------------------------------------------
    def ping(self) -> None:
        """Comes back if the process runs."""

    def progress(self) -> str | None:
        """What is being loaded, for people who wait."""
        return self._progress

    def live(self) -> None:
        """Never comes back: the caller learns of the end of the process by the failure of this call."""
        threading.Event().wait()

    def _note_progress(self, text: str) -> None:
        self._progress = text
