"""The settings of a runtime as plain data, so that one can be made in another process than the server's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from workers.group import WorkerGroup
from workers.recovery import MAX_SERVER_DEATHS, History
from workers.runtime import ModelRuntime
from workers.snapshots import SnapshotPolicy
from workers.under_way import UnderWay


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """See the arguments of `ModelRuntime` of the same names."""

    gap_timeout: float = 60.0
    max_adapters: int = 64
    max_sample_rows: int = 64
    decode_slice: int = 8
    turn_timeout: float | None = None
    restart_limit: int = 3
    death_limit: int = MAX_SERVER_DEATHS
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)

    def make(
        self,
        name: str,
        group: WorkerGroup,
        *,
        history: History,
        on_models_lost: Callable[[Sequence[str]], Awaitable[None]],
        under_way: UnderWay | None = None,
    ) -> ModelRuntime:
        """A runtime on a group; neither is started."""
        return ModelRuntime(
            name,
            group,
            gap_timeout=self.gap_timeout,
            max_adapters=self.max_adapters,
            max_sample_rows=self.max_sample_rows,
            decode_slice=self.decode_slice,
            turn_timeout=self.turn_timeout,
            restart_limit=self.restart_limit,
            death_limit=self.death_limit,
            on_models_lost=on_models_lost,
            history=history,
            snapshots=self.snapshots,
            under_way=under_way,
        )
