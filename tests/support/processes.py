"""Processes that are made to stand still, as one that hangs does."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def freeze(*pids: int) -> None:
    """Send SIGSTOP and come back when every thread of every process stands still.

    The signal is taken by one thread, which then stops the others: on a busy machine that takes as long as its next
    turn on a core does, and the others go on until then. Without the wait, a thread may answer after `kill` came back.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not all(stands_still(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process goes on although it was stopped"
        time.sleep(0.001)


def stands_still(pid: int) -> bool:
    """Whether every thread of a process stands still; one that has ended does."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return all((task / "stat").read_text().rsplit(") ", 1)[1][0] in "TtZX" for task in tasks)
    except (FileNotFoundError, ProcessLookupError):
        return True


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits only for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "Z"
    except FileNotFoundError:
        return True
