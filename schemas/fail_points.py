"""Numbered places at which a process can be told to die, to prove that nothing is lost if it does.

`TINSMITH_FAIL_AT=NUMBER,HIT,MARKER[,tree][;...]`: the process that comes to place NUMBER for the HIT-th time kills
itself with SIGKILL (`tree`: its whole process group), once; the file MARKER then says that it has happened. Without the
variable a place costs one look at an empty tuple. Not responsible for starting anything again.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "TINSMITH_FAIL_AT"

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
    "gradient.reduce",
)
"""Their order is their number, from 0."""


@dataclass(slots=True)
class _Armed:
    """What the variable says."""

    point: str
    hit: int
    marker: Path
    tree: bool
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reach(self, point: str) -> None:
        """Die, if this is the place and the time."""
        if point != self.point:
            return
        with self.lock:
            self.seen += 1
            if self.seen != self.hit:
                return
            try:
                os.close(os.open(self.marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                return
        if self.tree:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _armed(text: str) -> tuple[_Armed, ...]:
    armed = []
    for part in filter(None, text.split(";")):
        number, hit, marker, *rest = part.split(",")
        armed.append(_Armed(POINTS[int(number)], int(hit), Path(marker), rest == ["tree"]))
    return tuple(armed)


_ALL = _armed(os.environ.get(VARIABLE, ""))


def fail_point(point: str) -> None:
    """The process has come to this place."""
    for armed in _ALL:
        armed.reach(point)
