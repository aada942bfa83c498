"""The past of live models, as the runtimes ask for it: snapshots, and the log of what came after them.

Responsible for what of the log has to be executed again to bring a model back, and for recording snapshots. Not
responsible for executing (`workers/recovery.py`) or for when snapshots are taken (`workers/snapshots.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.leases import LeaseLost, Leases
from app.services.operations import Operations
from app.services.runs import lost
from app.services.training import creation_scope
from schemas.errors import NonFiniteGradient, TinsmithError, Unavailable
from schemas.fail_points import fail_point
from schemas.operations import Operation, SavedSnapshot
from store import operations as log
from store import runs as run_rows
from store import snapshots as snapshot_rows
from store.bodies import Bodies
from store.database import Store
from store.records import BodyRef, LoggedOperation, OperationRecord, RunRecord, SnapshotRecord
from store.snapshot_files import SnapshotFiles
from workers.recovery import Past, PastOperation, Snapshot

logger = logging.getLogger(__name__)

CLEARED = NonFiniteGradient.default_code
"""The failure that changes a model all the same: the gradient is cleared."""
LOADING = "load_weights"
STRAY_SECONDS = 3600.0
"""Age from which a file that no row names is not one that is being written."""


class ModelHistory:
    """Implements `workers.recovery.History` on the store. `clock` is the time, aware UTC; `leases` as `Operations`."""

    def __init__(
        self,
        store: Store,
        bodies: Bodies,
        files: SnapshotFiles,
        operations: Operations,
        clock: Callable[[], datetime],
        leases: Leases | None = None,
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._files = files
        self._operations = operations
        self._clock = clock
        self._leases = leases
        self.snapshots_kept = 0
        """Snapshots that were recorded since the server started."""
        self.recalled = 0
        """How often the past of a model was asked for, to bring it back."""

    async def recall(self, model_id: str) -> Past:
        """See `History.recall`."""
        self.recalled += 1
        waiting = self._operations.settling.waiting_to_settle()  # before the log is read: what it misses is here

        async def look(
            db: AsyncSession,
        ) -> tuple[RunRecord | None, list[SnapshotRecord], list[LoggedOperation], OperationRecord | None]:
            run = await run_rows.find_run(db, model_id)
            if run is None:
                return None, [], [], None
            scope = creation_scope(run.session_id)
            creation = await log.find_operation(db, run.project_id, scope, run.model_seq_id)
            snapshots = await snapshot_rows.snapshots_of(db, model_id)
            logged = await snapshot_rows.log_of(db, model_id, _covered(snapshots))
            return run, snapshots, logged, creation

        run, snapshots, logged, creation = await self._store.read(look)
        if run is None or creation is None or run.state not in run_rows.LIVE:
            raise lost(model_id)
        operations, collected = self._changes(run, logged, waiting, _covered(snapshots))
        await self._bring_folders(run, logged, snapshots, creation)
        return Past(
            project_id=run.project_id,
            snapshots=tuple(
                Snapshot(one.applied_seq, str(self._files.path(one.file)), one.sha256) for one in snapshots
            ),
            operations=tuple(operations),
            collected_seq=collected,
            creation=self._reader(run, creation.request_id),
        )

    async def _bring_folders(
        self,
        run: RunRecord,
        logged: Sequence[LoggedOperation],
        snapshots: Sequence[SnapshotRecord],
        creation: OperationRecord,
    ) -> None:
        """Have the checkpoints here that will be loaded once more. Raises `Unavailable`: it is tried again then.

        Whatever else is wrong with one is found, and told, when it is loaded.
        """
        after = snapshots[0].applied_seq if snapshots else -1
        wanted = [one.request_id for one in logged if one.kind == LOADING and one.seq_id > after]
        if not snapshots and creation.kind == LOADING:
            wanted.append(creation.request_id)
        for request_id in wanted:
            try:
                await self._operations.read_logged(run.project_id, request_id)
            except Unavailable:
                raise
            except TinsmithError as error:
                logger.warning("a checkpoint of model %s cannot be had: %s", run.model_id, error.message)

    async def new_snapshot_path(self) -> str:
        """See `History.new_snapshot_path`."""
        return str(self._files.new_path())

    async def keep_snapshot(self, model_id: str, applied_seq: int, path: str, saved: SavedSnapshot) -> bool:
        """See `History.keep_snapshot`."""
        fail_point("snapshot.before_row")
        new = SnapshotRecord(
            Path(path).name, model_id, applied_seq, saved.size_bytes, saved.sha256, created_at=self._clock()
        )

        async def rows(db: AsyncSession) -> tuple[list[str], list[BodyRef]] | None:
            if self._leases is not None:
                await self._leases.require(db, model_id)
            return await snapshot_rows.add_snapshot(db, new)

        try:
            unneeded = await self._store.write(rows)
        except LeaseLost:
            return False
        except Unavailable as error:
            logger.warning("a snapshot of %s is not recorded yet: %s", model_id, error.message)
            return False
        if unneeded is None:
            return False
        self.snapshots_kept += 1
        fail_point("snapshot.after_row")
        files, bodies = unneeded
        await self._files.delete(files)
        await self._bodies.delete(bodies)
        return True

    async def drop_snapshot(self, path: str) -> None:
        """See `History.drop_snapshot`."""
        file = Path(path).name
        await self._store.write(lambda db: snapshot_rows.drop_snapshot(db, file))
        await self._files.delete([file])

    async def sweep(self) -> None:
        """Remove the snapshots of runs that are over, and files that nothing came of."""
        files, bodies = await self._store.write(snapshot_rows.collect_ended)
        await self._files.delete(files)
        await self._bodies.delete(bodies)
        await self._files.sweep(await self._store.read(snapshot_rows.snapshot_files), STRAY_SECONDS)

    async def sweep_at_start(self) -> None:
        """Remove every snapshot file that no row names, and the requests that no run needs any more."""
        await self._bodies.delete(await self._store.write(snapshot_rows.drop_unneeded))
        await self._files.sweep(await self._store.read(snapshot_rows.snapshot_files))

    def _changes(
        self,
        run: RunRecord,
        logged: list[LoggedOperation],
        waiting: Mapping[str, TinsmithError | None],
        collected: int,
    ) -> tuple[list[PastOperation], int]:
        """What changed the model, in order, and the last seq_id of it that cannot be read back any more."""
        changes: list[PastOperation] = []
        for one in logged:
            failed = _outcome(one, waiting)
            if one.kind not in snapshot_rows.CHANGING or failed is None:
                continue
            if one.size is None:
                collected = one.seq_id
                continue
            load = self._reader(run, one.request_id)
            is_step = one.kind == "optim_step"
            changes.append(PastOperation(one.seq_id, one.request_id, is_step, one.size, failed, load, one.deaths))
        return changes, collected

    def _reader(self, run: RunRecord, request_id: str) -> Callable[[], Awaitable[Operation]]:
        return partial(self._operations.read_logged, run.project_id, request_id)


def _covered(snapshots: Sequence[SnapshotRecord]) -> int:
    """What comes before the oldest snapshot that is kept was collected when it became that; -1: nothing was."""
    return snapshots[-1].applied_seq if len(snapshots) >= snapshot_rows.KEPT else -1


def _outcome(one: LoggedOperation, waiting: Mapping[str, TinsmithError | None]) -> bool | None:
    """Whether an operation failed, of those that had an effect; None for all others."""
    if one.state == "pending" and one.request_id in waiting:
        error = waiting[one.request_id]
        return False if error is None else True if error.code == CLEARED else None
    if one.state in ("done", "expired"):
        return False
    return True if one.state == "failed" and one.error_code == CLEARED else None
