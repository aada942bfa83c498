"""What travels on the pipes between the server and a rank's process: one pickled message after another.

Both ends are the same program of the same version, started by us; nothing else ever writes to these pipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError
from workers.spec import WorkerSpec

PICKLE_PROTOCOL = 5
"""The first protocol that writes numpy arrays without an extra copy."""


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a rank: what to load, and (`spec.place`) where it meets the others."""

    spec: WorkerSpec
    rank: int


@dataclass(frozen=True, slots=True)
class Call:
    """Run a registered method; answered by one `Answer` with the same id."""

    call_id: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by the calls' thread when it is idle, by the reader thread while a call runs."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End after the call that is running."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being loaded, for people who wait."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The base model is loaded."""

    info: BaseModelInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The base model cannot be loaded; the process ends."""

    error: TinsmithError


@dataclass(frozen=True, slots=True)
class Answer:
    """The value or the error of a call."""

    call_id: int
    value: Any = None
    error: TinsmithError | None = None


@dataclass(frozen=True, slots=True)
class Logged:
    """A record of the rank's log, for the server to write in its own form; `exception` is a traceback in text."""

    logger: str
    level: int
    created: float
    message: str
    exception: str | None = None


Request = Start | Call | Ping | Stop
Reply = Progress | Ready | StartFailed | Answer | Logged
