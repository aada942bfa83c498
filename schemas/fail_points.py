"""Numbered places at which a process can be told to kill, to prove that nothing is lost if one dies there.

`TINSMITH_FAIL_AT=NUMBER[:KIND],HIT,MARKER[,VICTIM][;...]`: the process that comes to place NUMBER for the HIT-th time
(counting operations of KIND only, if one is given) kills VICTIM with SIGKILL, once; the file MARKER then says that it
has happened. VICTIM is `self` (the default), `edge` (the server), `worker` (the worker processes of the server) or
`tree` (both). A victim that is not there at that moment, because it died before and is not back, is as dead as it would
be. Without the variable a place costs one look at an empty tuple. Not responsible for starting anything again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "TINSMITH_FAIL_AT"
VICTIMS = ("self", "edge", "worker", "tree")

POINTS: tuple[str, ...] = (
    "accept.before_row",
    "accept.after_row",
    "turn.before_call",
    "turn.after_call",
    "result.before_row",
    "result.after_row",
    "snapshot.before_row",
    "snapshot.after_row",
    "recover.before_restore",
    "recover.replayed",
    "forward_backward.opened",
    "forward_backward.computed",
    "optim_step.taken",
    "zero_grad.done",
    "save.begun",
    "save.written",
    "load.done",
    "snapshot.captured",
    "snapshot.written",
    "snapshot.renamed",
    "restore.done",
    "sample.turn",
    "checkpoint.forgotten",
    "checkpoint.replaced",
    "expiry.found",
    "sampler.created",
    "session.over",
    "copy.linked",
    "copy.recorded",
    "export.encrypted",
    "failure.before_row",
    "failure.after_row",
    "refusal.recorded",
    "adapter.created",
    "adapter.removed",
    "start.swept",
    "upload.begun",
    "upload.file",
    "upload.complete",
    "gradient.reduce",
)
"""Their order is their number, from 0."""

_WORKER_PROGRAM = "workers.child"
_IN_WORKER = _WORKER_PROGRAM in sys.orig_argv
_PARENT = os.getppid()
"""Of a worker: the server. After its death the worker is somebody else's child, who is nobody's victim."""


def _victims(victim: str) -> list[int]:
    """Process ids of what is there of the victim, this process last."""
    me = os.getpid()
    if _IN_WORKER:
        server = [_PARENT] if os.getppid() == _PARENT else []
        workers = [me]
    else:
        server, workers = [me], _workers_of(me)
    found = {"self": [me], "edge": server, "worker": workers, "tree": [*server, *workers]}[victim]
    return sorted(found, key=lambda pid: pid == me)


def _workers_of(server: int) -> list[int]:
    """Each is a child of the thread that started it."""
    found = []
    for task in Path(f"/proc/{server}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child ended meanwhile
            for child in (task / "children").read_text().split():
                if _WORKER_PROGRAM.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


@dataclass(slots=True)
class _Armed:
    """What the variable says."""

    point: str
    kind: str
    hit: int
    marker: Path
    victim: str
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reach(self, point: str, kind: str) -> None:
        """Kill, if this is the place and the time."""
        if point != self.point or (self.kind and kind != self.kind):
            return
        with self.lock:
            self.seen += 1
            if self.seen < self.hit or self.marker.exists():
                return
            pids = _victims(self.victim)
            try:
                os.close(os.open(self.marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                return
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, signal.SIGKILL)


def _armed(text: str) -> tuple[_Armed, ...]:
    armed = []
    for part in filter(None, text.split(";")):
        place, hit, marker, *rest = part.split(",")
        number, _, kind = place.partition(":")
        [victim] = rest or ["self"]
        if victim not in VICTIMS:
            raise ValueError(f"{VARIABLE}: {victim!r} is none of {', '.join(VICTIMS)}")
        armed.append(_Armed(POINTS[int(number)], kind, int(hit), Path(marker), victim))
    return tuple(armed)


_ALL = _armed(os.environ.get(VARIABLE, ""))


def fail_point(point: str, kind: str = "") -> None:
    """The process has come to this place, with an operation of this kind where that is known."""
    for armed in _ALL:
        armed.reach(point, kind)
