"""Training runs: whose they are, and whether they can take work.

Responsible for the look-up that every request about a model begins with. Not responsible for the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.base_models import BaseModels
from app.services.caller import calling_key
from app.services.leases import Leases
from app.services.operations import Operations
from app.services.paths import is_direct, model_id_of, session_of
from app.services.submission import Rows
from schemas.errors import Gone, ModelLost, NotFound, Unavailable
from schemas.fail_points import fail_point
from schemas.operations import LoraSpec, OptimizerType
from store import checkpoints, runs, samplers, sessions, slots
from store.database import Store
from store.records import CheckpointKind, CheckpointRecord, RunRecord, SessionRecord
from workers.runtime_protocol import Runtime


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run with its newest named checkpoints."""

    run: RunRecord
    training: CheckpointRecord | None
    sampler: CheckpointRecord | None


class Runs:
    """Training runs of all projects; every method is told whose."""

    def __init__(
        self,
        store: Store,
        models: BaseModels,
        operations: Operations,
        clock: Callable[[], datetime],
        leases: Leases | None = None,
    ) -> None:
        self._store = store
        self._models = models
        self._operations = operations
        self._clock = clock
        self._leases = leases
        self.unserved: set[str] = set()
        """Live runs of another process that are not back here: their base model is not served, or what was accepted for
        them is not in line yet. They take no work."""

    def creation(
        self,
        project_id: str,
        session_id: str,
        model_seq_id: int,
        *,
        base_model: str,
        lora: LoraSpec | None,
        user_metadata: Mapping[str, Any] | None,
        optimizer: OptimizerType,
    ) -> Rows:
        """What adds a new run to the store, as made with the key that calls now.

        The rows raise `NotFound` or `Gone` (session) and `SeqIdConflict`.
        """
        key_id = calling_key()

        async def rows(db: AsyncSession) -> None:
            await require_active(db, project_id, session_id)
            await runs.create_run(
                db,
                model_id=model_id_of(session_id, model_seq_id),
                project_id=project_id,
                session_id=session_id,
                model_seq_id=model_seq_id,
                base_model=base_model,
                lora=lora,
                user_metadata=user_metadata or {},
                optimizer_type=optimizer,
                now=self._clock(),
                key_id=key_id,
            )

        return rows

    async def owned(self, project_id: str, model_id: str, *, field: str = "model_id") -> RunRecord:
        """The run, whatever its state. Raises `NotFound` if this project has no such run."""
        run = await self._store.look_up(lambda db: runs.get_run(db, project_id, model_id))
        if run is None or run.state == "failed":
            raise NotFound(f"there is no training run {model_id[:200]!r}", field=field)
        return run

    def runtime(self, run: RunRecord) -> Runtime:
        """The runtime that holds the run. Raises `ModelLost`; `Unavailable`: its base model is not served here now."""
        if run.state == "lost":
            raise lost(run.model_id)
        runtime = self._models.runtimes.get(run.base_model)
        if runtime is None:
            raise not_served(run.base_model)
        return runtime

    def guard(self, project_id: str, model_id: str) -> Rows:
        """What must hold, in the accepting transaction, for a run to take new work; also notes the time.

        Raises (inside the transaction): `ModelLost`, `Gone`, `NotFound`, `Unavailable`.
        """

        async def check(db: AsyncSession) -> None:
            run = await runs.get_run(db, project_id, model_id)
            if run is None or run.state == "failed":
                raise NotFound(f"there is no training run {model_id[:200]!r}", field="model_id")
            if run.state == "lost":
                raise lost(model_id)
            if run.state == "closed":
                await require_active(db, project_id, run.session_id)
                raise unloaded(model_id)
            if model_id in self.unserved:
                served = run.base_model in self._models.runtimes
                raise coming_back(model_id) if served else not_served(run.base_model)
            await runs.touch_run(db, model_id, self._clock())

        return check

    async def note_refusal(self, project_id: str, model_id: str, seq_id: int) -> None:
        """A refused request used up this number of this model; models of other projects are left alone."""
        run = await self._store.look_up(lambda db: runs.get_run(db, project_id, model_id))
        if run is None or run.state not in ("creating", "ready"):
            return
        runtime = self._models.runtimes.get(run.base_model)
        await self._operations.refuse(project_id, runtime, model_id, f"model:{model_id}", seq_id)

    async def page(self, project_id: str, limit: int, offset: int) -> tuple[list[ListedRun], int]:
        """Runs of the project, newest first, and how many there are."""

        async def read(db: AsyncSession) -> tuple[list[ListedRun], int]:
            page, total = await runs.list_runs(db, project_id, limit, offset)
            return await _with_checkpoints(db, project_id, page), total

        return await self._store.read(read)

    async def single(self, project_id: str, model_id: str) -> ListedRun:
        """One run as `page` shows it. Raises `NotFound`."""
        run = await self.owned(project_id, model_id, field="training_run_id")
        return (await self._store.read(lambda db: _with_checkpoints(db, project_id, [run])))[0]

    async def mark_lost(self, model_ids: Sequence[str]) -> None:
        """The live state of these runs is gone."""

        async def rows(db: AsyncSession) -> None:
            for model_id in model_ids:
                if self._leases is None or await self._leases.holds(db, model_id):
                    await runs.set_run_state(db, model_id, "lost")

        await self._store.write(rows)

    async def finish_session(
        self, project_id: str, session_id: str, reason: str, detail: str | None, *, by: str
    ) -> SessionRecord | None:
        """End a session for its client's own reason, and close it as `close_session` does; None if there is none.

        The first reason wins. `by` is the id of the key that asked.
        """
        now = self._clock()

        async def rows(db: AsyncSession) -> tuple[SessionRecord | None, list[RunRecord]]:
            record = await sessions.finish_session(db, project_id, session_id, reason, detail, now, by=by)
            return record, [] if record is None else await self._end_rows(db, session_id, now)

        record, closed = await self._store.write(rows)
        if record is not None:
            self._let_go(session_id, closed)
        return record

    async def expire_session(self, session_id: str) -> bool:
        """End a session that was silent for too long, and close it as `close_session` does; False if it was over."""
        now = self._clock()

        async def rows(db: AsyncSession) -> list[RunRecord] | None:
            if not await sessions.expire_session(db, session_id, now):
                return None
            return await self._end_rows(db, session_id, now)

        closed = await self._store.write(rows)
        if closed is not None:
            self._let_go(session_id, closed)
        return closed is not None

    async def close_session(self, session_id: str) -> None:
        """Close the runs of a session that is over, free their adapters, drop its samples and ephemeral weights."""
        now = self._clock()
        self._let_go(session_id, await self._store.write(lambda db: self._end_rows(db, session_id, now)))

    async def free_session(self, session_id: str) -> None:
        """Free what this server has of a session that was closed at another one."""
        self._let_go(session_id, await self._store.read(lambda db: runs.runs_of_session(db, session_id)))

    async def _end_rows(self, db: AsyncSession, session_id: str, now: datetime) -> list[RunRecord]:
        closed = await _close_rows(db, session_id, now)
        if self._leases is not None:
            await self._leases.tell(db, "ended", session=session_id)
        return closed

    def _let_go(self, session_id: str, closed: Sequence[RunRecord]) -> None:
        """A session is over by its rows: its adapters and samples go from memory."""
        fail_point("session.over")
        for run in closed:
            runtime = self._models.runtimes.get(run.base_model)
            if runtime is not None:
                runtime.close_model(run.model_id)
            self._operations.let_go_of_run(run.model_id)
            self.unserved.discard(run.model_id)
        self._operations.left.end_session(session_id)
        self._operations.cancel_samples_of(session_id)


async def _close_rows(db: AsyncSession, session_id: str, now: datetime) -> list[RunRecord]:
    found = await runs.runs_of_session(db, session_id)
    for run in found:
        await runs.set_run_state(db, run.model_id, "closed")
        inflight = await slots.slot_checkpoint(db, run.model_id)
        if inflight is not None:
            await checkpoints.set_checkpoint_expiry(db, inflight, now)
    for sampler in await samplers.samplers_of_session(db, session_id):
        if sampler.checkpoint_id is None:
            continue
        checkpoint = await checkpoints.get_checkpoint(db, sampler.project_id, sampler.checkpoint_id)
        if checkpoint is not None and checkpoint.name is None:
            await checkpoints.set_checkpoint_expiry(db, checkpoint.checkpoint_id, now)
    return found


async def _with_checkpoints(db: AsyncSession, project_id: str, page: Sequence[RunRecord]) -> list[ListedRun]:
    latest = await checkpoints.latest_checkpoints(db, project_id, [run.model_id for run in page])

    def newest(run: RunRecord, kind: CheckpointKind) -> CheckpointRecord | None:
        return latest.get((run.model_id, kind))

    return [ListedRun(run, newest(run, "training"), newest(run, "sampler")) for run in page]


async def require_active(db: AsyncSession, project_id: str, session_id: str) -> None:
    """Raise `NotFound` or `Gone` unless the project's session can take new work."""
    session = await sessions.get_session(db, project_id, session_id)
    if session is None:
        raise NotFound(f"there is no session {session_id[:200]!r}", field="session_id")
    if session.state != "active":
        raise session_ended(session_id)


def lost(model_id: str) -> ModelLost:
    """The error of work for a run whose live state is gone."""
    return ModelLost(
        f"the live weights of {model_id!r} are gone: the process that held them has ended, or the server was restarted",
        field="model_id",
        hint="create a new training client from the last saved state",
    )


def not_served(base_model: str) -> Unavailable:
    """The error of work for a run whose base model is not served here: its state waits until it is."""
    return Unavailable(
        f"this server does not serve base model {base_model!r} now; the state of the training run is kept",
        hint="start it with that base model again (--base-model), or add it: tinsmith models add",
        code="base_model_unavailable",
    )


def coming_back(model_id: str) -> Unavailable:
    """The error of work for a run that this server is taking over: what was accepted before comes first."""
    return Unavailable(
        f"training run {model_id!r} is being taken over by this server", hint="send it again in a moment"
    )


def unloaded(model_id: str) -> Gone:
    """The error of work for a run that was unloaded, or that only holds a copied checkpoint."""
    return Gone(
        f"model {model_id!r} has no live weights: it was unloaded, or holds a copied checkpoint only",
        field="model_id",
        hint="load its checkpoint into a new training client",
        code="model_unloaded",
    )


def session_ended(session_id: str) -> Gone:
    """The error of new work in a session that is over."""
    return Gone(
        f"session {session_id!r} is over; it takes no new work",
        field="session_id",
        hint="create a new session",
        code="session_ended",
    )


def optimizer_type(stored: str | None) -> OptimizerType:
    """What a row says about an optimizer."""
    return "dimuon" if stored == "dimuon" else "adamw"


def optimizer_of(run: RunRecord) -> OptimizerType:
    """The optimizer that a run was created with."""
    return optimizer_type(run.optimizer_type)


def model_scope(model_id: str) -> str:
    """The scope of a model's requests in the operation log."""
    return f"model:{model_id}"


def sampler_scope(sampler_id: str) -> str:
    """The scope of a sampler's requests in the operation log."""
    return f"sampler:{sampler_id}"


def session_of_scope(scope: str) -> str:
    """The session that a scope of the operation log belongs to; "" if it belongs to none."""
    kind, _, rest = scope.partition(":")
    if is_direct(scope):
        return ""
    return rest.rpartition(":")[0] if kind == "session" else session_of(rest)
