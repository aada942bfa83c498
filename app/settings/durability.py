"""What a crash costs."""

from __future__ import annotations

from pydantic import Field

from app.settings.values import Count, Seconds, Theme


class Durability(Theme):
    """Restarts of workers, hung turns, and snapshots of training runs."""

    heading = "Workers that die, and snapshots"

    worker_start_timeout: Seconds = Field(600.0, description="Seconds a worker may take to load its base model.")
    restart_limit: int = Field(
        3, ge=0, description="How often in a row a worker that died is started again before its base model fails."
    )
    death_limit: Count = Field(
        3,
        description="How often in a row the whole server may be killed while it executes an operation before that "
        "operation fails: it may be what takes the machine down.",
    )
    turn_timeout: float = Field(
        900.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after which a turn of training or sampling counts as hung: its worker is ended and "
        "started again, and what was under way runs again. A turn takes seconds; on a machine that swaps it may take "
        "minutes. 0: no limit.",
    )
    snapshot_operations: Count = Field(
        64,
        description="Operations that change a training run until a snapshot of its whole state is due. After a crash a "
        "run goes on from its newest snapshot, and what came after it is executed again.",
    )
    snapshot_seconds: Seconds = Field(
        120.0, description="Seconds after a change of a training run until a snapshot of it is due."
    )
    snapshot_mib: Count = Field(
        256, description="MiB of requests that change a training run until a snapshot of it is due."
    )
    snapshot_share: float = Field(
        0.05,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Part of the time that may be spent on taking and writing snapshots, one at a time; with many "
        "training runs they are then taken later than they are due.",
    )
