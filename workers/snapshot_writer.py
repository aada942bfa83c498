"""Writes snapshots of adapters beside the calls of a worker, one thread for each.

Not responsible for what is in a snapshot (the engine) nor for when one is taken (`workers/snapshots.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from schemas.errors import TinsmithError
from schemas.fail_points import fail_point
from schemas.operations import SavedSnapshot
from workers.faults import to_tinsmith_error


class SnapshotWriter:
    """Snapshots that are being written, and those that are finished and not yet asked for, by path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: dict[str, SavedSnapshot | TinsmithError] = {}

    def write(self, path: str, write: Callable[[], SavedSnapshot]) -> None:
        """Begin to write; returns at once."""
        fail_point("snapshot.captured")
        threading.Thread(target=self._run, args=(path, write), name="snapshot", daemon=True).start()

    def take_finished(self) -> dict[str, SavedSnapshot | TinsmithError]:
        """What has ended since the last call: the file, or why there is none."""
        with self._lock:
            finished, self._finished = self._finished, {}
        return finished

    def _run(self, path: str, write: Callable[[], SavedSnapshot]) -> None:
        try:
            outcome: SavedSnapshot | TinsmithError = write()
        except Exception as error:
            outcome = to_tinsmith_error(error, "writing a snapshot")
        with self._lock:
            self._finished[path] = outcome
