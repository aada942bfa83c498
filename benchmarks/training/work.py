"""What crosses the border between the measuring process and the processes that are measured. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Dtype = Literal["float32", "bfloat16"]
Kind = Literal["peft", "engine", "server", "gemm", "generate", "paged", "sampler"]
"""The last three sample (`benchmarks/sampling`)."""
Layout = Literal["padded", "each"]
"""How a peft loop feeds a batch: in one padded pass, or sequence by sequence. Others choose for themselves."""

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-12
"""AdamW as the SDK's `AdamParams` has it by default, weight decay 0; equal on all sides."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence: `targets[i]` is the token after `tokens[i]`, both int64 [N]; every position counts once."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """`steps` steps of every client: each the gradient of the summed loss over its batch, then its optimizer step."""

    clients: tuple[tuple[Example, ...], ...]
    layout: Layout = "padded"
    steps: int = 1
    profile: bool = False

    @property
    def tokens(self) -> int:
        """Real tokens of all clients and steps together, padding not counted."""
        return self.steps * sum(len(example.tokens) for batch in self.clients for example in batch)


@dataclass(frozen=True, slots=True)
class SideSpec:
    """What a measured process is. Two runs of one spec share its process.

    `clients` adapters of rank `rank` on all attention and MLP projections, and on the head if `unembed`; the adapter of
    client i starts as the engine initialises one of seed i, on every side.
    """

    kind: Kind
    folder: str
    dtype: Dtype
    device: str
    threads: int
    rank: int
    clients: int = 1
    unembed: bool = False
    checkpointing: bool = False
    gemm_rows: int = 1024
    snapshots: bool = True
    """Whether a server takes snapshots, by its default settings; the log is always kept."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss of each client's batch before the first step; `parts` are numbers that only this kind of side has."""

    losses: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    drawn: tuple[tuple[int, ...], ...] = ()
    """Tokens of every sequence that a sampling side drew."""


@dataclass(frozen=True, slots=True)
class Took:
    """One piece of work: seconds of wall clock and of CPU (children included), peak memory, and what came out.

    `rss_before` and `rss_peak` are resident bytes of the process before the work and at its highest during it; 0 where
    the system does not tell.
    """

    wall: float
    cpu: float
    rss_before: int
    rss_peak: int
    outcome: Outcome
    profile: str = ""


class Side(Protocol):
    """One way to train, in a process of its own."""

    def step(self, work: Any) -> Outcome:
        """Do the work; back only when all of it is done."""

    def cpu_seconds(self) -> float:
        """CPU seconds that this side has used so far, in all of its processes."""

    def close(self) -> None:
        """End what this side started."""
