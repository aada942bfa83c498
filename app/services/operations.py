"""Operations on their way: accepted durably, held back where a limit says so, handed to their runtime, looked at.

Responsible for accepting exactly once under a natural key. Not responsible for what an operation means (`training.py`,
`weights.py`, `sampling.py`), for its order (`workers/runtime.py`), for recording its outcome (`settling.py`) or for
delivery (`futures.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import decode_operation
from app.services.caller import calling_key
from app.services.folders import Folders
from app.services.held import LAST, HeldBack
from app.services.leases import Leases
from app.services.left_in_log import LeftInLog
from app.services.limit_charges import charge
from app.services.observing import Observer
from app.services.settling import Live, Settling
from app.services.submission import Measure, Submission
from app.services.tenant_limits import Effective, TenantLimits, check_fits
from app.services.turnstile import current_place
from schemas.errors import EngineFailure, InvalidRequest, NotNow, SeqIdConflict, TinsmithError, Unavailable
from schemas.fail_points import fail_point
from schemas.http.base import MAX_INT64
from schemas.operations import Operation, OperationResult
from store import operations as log
from store.bodies import Bodies
from store.database import Store
from store.records import BodyRef, NewOperation, OperationRecord
from store.snapshots import CHANGING
from workers.runtime_protocol import Runtime
from workers.tickets import QueueState, Ticket, TurnNote

logger = logging.getLogger(__name__)

WAITING_BODY = 1024
"""Bytes of a stored sample that are kept in memory while it waits: thousands of samples may wait, for minutes."""


QUICK_BYTES = 64 * 1024
"""A stored request up to which reading it takes less than its way to a thread and back: a quarter of a millisecond."""


class Operations:
    """Accepts operations and hands them to their runtimes; `settling` records what comes of them.

    Args:
        folders: the checkpoint folders.
        new_id: makes request ids of at least 128 random bits.
        clock: the time, aware UTC.
        wake: called with a request id and its scope once its outcome is durable; scope None = not told.
        limits: of projects and keys.
        leases: where operations run, if several servers share the database; None = all of them here.
        observers: who measures.
    """

    def __init__(
        self,
        store: Store,
        bodies: Bodies,
        *,
        folders: Folders,
        new_id: Callable[[], str],
        clock: Callable[[], datetime],
        wake: Callable[[str, str | None], None],
        limits: TenantLimits,
        leases: Leases | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._store = store
        self._limits = limits
        self._held = HeldBack(store, limits, clock)
        self._bodies = bodies
        self._folders = folders
        self._new_id = new_id
        self._clock = clock
        self._leases = leases
        self._observers = observers
        self._live: dict[str, Live] = {}
        """By request id."""
        self.settling = Settling(
            store,
            bodies,
            folders=folders,
            clock=clock,
            wake=wake,
            limits=limits,
            held=self._held,
            live=self._live,
            leases=leases,
            observers=observers,
        )
        self.left = LeftInLog(self.settling.fail_now)

    async def stopping(self) -> None:
        """The server is about to stop: what is not done stays in the log and runs after the restart."""
        self.settling.stopping()
        await self._held.close()

    async def accept(self, submission: Submission) -> OperationRecord:
        """Make the operation durable, then hand it to its runtime; a repeat returns what the first one made.

        Goes on when the caller is cancelled: an operation that is in the log must reach its runtime.

        Raises:
            SeqIdConflict: the key was used with another body.
            Unavailable: the folder that it reads cannot be had now.
            OverLimit: a limit of the project or key does not allow it; `RateLimited`: not yet.
            TinsmithError: whatever `guard` raises.
        """
        return await asyncio.shield(asyncio.create_task(self._accept_with_folder(submission)))

    async def _accept_with_folder(self, submission: Submission) -> OperationRecord:
        effective = await self._limits.effective(submission.project_id, calling_key())
        with self._folders.held(submission.reads):
            if submission.reads is not None:
                await self._folders.bring(submission.reads)
            return await self._accept(submission, effective)

    async def _accept(self, submission: Submission, effective: Effective | None) -> OperationRecord:
        request_id, began, place = self._new_id(), time.time(), current_place()
        body = await self._bodies.put(request_id, "request", submission.body)
        fail_point("accept.before_row", submission.kind)

        async def append(db: AsyncSession) -> tuple[OperationRecord, bool, bool]:
            seq_id = submission.seq_id
            if seq_id is None:
                seq_id = await next_seq(db, submission.scope)
            record, created = await log.append(
                db,
                NewOperation(
                    request_id=request_id,
                    project_id=submission.project_id,
                    kind=submission.kind,
                    scope=submission.scope,
                    seq_id=seq_id,
                    digest=submission.digest,
                    body=body,
                    created_at=self._clock(),
                    checkpoint_id=submission.checkpoint_id,
                ),
            )
            here = True
            if created:
                await submission.guard(db)
                record = await self._charged(db, submission, record, effective)
                if self._leases is not None:
                    here = await self._leases.place(db, record, submission.model_id, submission.creates)
            if place is not None:
                place.leave()  # the disk is waited for beside the turns of others
            return record, created, here

        try:
            record, created, here = await self._store.write(append)
        except SeqIdConflict as error:
            await self._bodies.delete([body])
            if submission.creates:  # the number that the client gave is the model's place in its session
                raise SeqIdConflict(
                    f"model_seq_id {submission.seq_id} was used before with another request",
                    field="model_seq_id",
                    hint=error.hint,
                ) from None
            raise
        except Exception:
            await self._bodies.delete([body])
            raise
        if not created:
            await self._bodies.delete([body])
            return record
        fail_point("accept.after_row", submission.kind)
        if self._leases is not None and submission.creates and submission.model_id is not None:
            self._leases.held[submission.model_id] = 1
        for observer in self._observers:
            observer.accepted(request_id, submission.kind, submission.runtime.name, began)
        if here:
            self.dispatch(record, submission)
        return record

    async def _charged(
        self, db: AsyncSession, submission: Submission, record: OperationRecord, effective: Effective | None
    ) -> OperationRecord:
        """A new operation, with what limits are charged for it; raises as `accept`."""
        if effective is None:
            return record
        check_fits(effective, submission.cost)
        limited = await charge(
            db,
            effective,
            record,
            submission.cost,
            ordered=submission.model_id is not None and not submission.creates and not submission.last,
            creates=submission.creates,
            now=self._clock().timestamp(),
            patience=submission.patience,
        )
        return record if limited is None else replace(record, limited=limited)

    def dispatch(self, record: OperationRecord, submission: Submission) -> None:
        """Hand a logged operation to its runtime (also used for what an earlier process did not finish)."""
        reads, writes = submission.reads, submission.writes
        release = self._folders.hold(writes if reads is None else reads)
        live = Live(submission.runtime, record.scope, reads, writes, release)
        if self._leases is not None and submission.model_id is not None:
            live.fence = self._leases.held.get(submission.model_id, 0)
        self._live[record.request_id] = live
        self.left.taken(record.request_id)
        submission = replace(submission, body=b"")  # what waits is read back when it runs
        if submission.model_id is None and isinstance(record.body, bytes) and len(record.body) > WAITING_BODY:
            record = replace(record, body=b"")

        for observer in self._observers:
            observer.queued(record.request_id, record.kind, submission.runtime.name)
        if submission.creates and submission.model_id is not None and not submission.last:
            submission.runtime.open_model(submission.model_id)
        ticket = self._ticket(record, submission)

        def go() -> None:
            submission.runtime.submit(ticket)

        place = -1 if submission.creates else LAST if submission.last else record.seq_id
        if not self._held.take(record, submission.runtime.name, submission.model_id, place, go):
            go()

    def _ticket(self, record: OperationRecord, submission: Submission) -> Ticket:
        def started() -> None:
            if (live := self._live.get(record.request_id)) is not None:
                live.started = self._clock()
            for observer in self._observers:
                observer.started(record.request_id)

        def turn(note: TurnNote) -> None:
            for observer in self._observers:
                observer.turn(record.request_id, note)

        async def load() -> Operation:
            with passing():
                return await self._folders.placed(await self._read_back(record, submission.measure))

        async def done(outcome: OperationResult | TinsmithError) -> None:
            await self.settling.settle(record, submission, outcome)

        ordered = submission.model_id is not None and not submission.last
        return Ticket(
            request_id=record.request_id,
            project_id=record.project_id,
            model_id=submission.model_id,
            seq_id=(0 if submission.creates else record.seq_id) if ordered else None,
            load=load,
            done=done,
            started=started,
            is_step=record.kind == "optim_step",
            changes=record.kind in CHANGING,
            size=record.body.size if isinstance(record.body, BodyRef) else len(record.body),
            undo=submission.cleanup,
            progress=submission.progress,
            turn=turn if self._observers else None,
            deaths=record.deaths,
            left_over=submission.left_over,
        )

    def samples_held(self, project_id: str, runtime: Runtime) -> int:
        """How many samples of a project limits hold back from a runtime."""
        return self._held.samples(project_id, runtime.name)

    def let_go_of_run(self, model_id: str) -> None:
        """A run is over, and its runtime knows: what limits hold back of it fails there."""
        self._held.let_go_of_run(model_id)

    async def read_logged(self, project_id: str, request_id: str) -> Operation:
        """An operation of the log, to be executed again.

        Raises `EngineFailure` if it cannot be read back, `NotNow` if that may pass, and what `Folders.placed` raises.
        """
        with passing():
            record = await self._store.look_up(lambda db: log.get_operation(db, project_id, request_id))
            if record is None:
                raise unreadable()
            return await self._folders.placed(await self._read_back(record))

    async def _read_back(self, record: OperationRecord, measure: Measure | None = None) -> Operation:
        try:
            if record.body == b"":
                stored = await self._store.look_up(
                    lambda db: log.get_operation(db, record.project_id, record.request_id)
                )
                record = stored or record
            data = await self._bodies.get(record.body)
            if len(data) <= QUICK_BYTES:
                operation, weight = _decode(record.kind, data, measure)
            else:
                operation, weight = await asyncio.to_thread(_decode, record.kind, data, measure)
            if (live := self._live.get(record.request_id)) is not None and weight is not None:
                live.weight = weight
            return operation
        except Unavailable as error:
            logger.warning("the stored request %s cannot be read now: %s", record.request_id, error.message)
            raise
        except Exception as error:
            logger.exception("the stored request %s (%s) cannot be read back", record.request_id, record.kind)
            raise unreadable() from error

    def pending(self) -> Counter[str]:
        """How many operations are accepted and not settled, by base model."""
        return Counter(live.runtime.name for live in self._live.values())

    def has(self, request_id: str) -> bool:
        """Whether a runtime of this server has the operation."""
        return request_id in self._live

    def started_at(self, request_id: str) -> datetime | None:
        """When an operation that has no outcome yet began to run; None: it has not, or runs at another server."""
        live = self._live.get(request_id)
        return None if live is None else live.started

    def base_model(self, request_id: str) -> str | None:
        """The base model of an operation that a runtime of this server has."""
        live = self._live.get(request_id)
        return None if live is None else live.runtime.name

    def queue_state(self, request_id: str) -> QueueState:
        """Why a pending operation is not done yet, in words for its client."""
        live = self._live.get(request_id)
        if live is None:
            reason = self.left.reason(request_id)
            return QueueState("active" if reason is None else "paused_capacity", reason)
        held = self._held.reason(request_id)
        if held is not None:
            return QueueState("paused_rate_limit", held)
        doing = self._folders.doing(live.reads, live.writes)
        return live.runtime.waiting(request_id) if doing is None else QueueState("active", doing)

    def cancel(self, request_id: str) -> None:
        """Drop a sample, wherever it runs; ids that no runtime has are ignored."""
        if not self.cancel_here(request_id) and self._leases is not None:
            self._leases.tell_soon("cancelled", request=request_id)

    def cancel_here(self, request_id: str) -> bool:
        """Drop a sample if a runtime of this server has it, or it waits for one; returns whether that is so."""
        live = self._live.get(request_id)
        if live is not None:
            self._held.let_go(request_id)
            live.runtime.cancel(request_id)
            return True
        return self.left.cancel(request_id)

    def cancel_samples_of(self, session_id: str) -> None:
        """Drop the unfinished samples of a session that is over."""
        prefix = f"sampler:{session_id}:sample:"
        for request_id, live in list(self._live.items()):
            if live.scope.startswith(prefix):
                self.cancel_here(request_id)

    async def refuse(self, project_id: str, runtime: Runtime | None, model_id: str, scope: str, seq_id: int) -> None:
        """Record that a refused request used up `seq_id` of a model, so that later ones do not wait for it.

        `runtime`: that of its base model; None = it is not served here.
        """
        now = self._clock()

        async def rows(db: AsyncSession) -> None:
            await log.record_refusal(db, project_id, scope, seq_id, now)
            if self._leases is not None:
                await self._leases.tell(db, "refused", model=model_id, seq_id=seq_id)

        await self._store.write(rows)
        fail_point("refusal.recorded")
        if runtime is not None:
            runtime.note_refused(model_id, seq_id)


def _decode(kind: str, data: bytes, measure: Measure | None) -> tuple[Operation, float | None]:
    operation = decode_operation(kind, data)
    return operation, None if measure is None else measure.weigh(operation)


@contextmanager
def passing() -> Iterator[None]:
    """What is `Unavailable` inside passes: raises `NotNow` for it, so that whoever reads an operation back waits."""
    try:
        yield
    except Unavailable as error:
        raise NotNow(error.message, hint=error.hint) from error


def unreadable() -> EngineFailure:
    """The error of a request whose stored form is damaged or gone."""
    return EngineFailure(
        "the server cannot read this request back from its disk",
        hint="send it again, with a new seq_id",
        code="damaged_body",
    )


async def next_seq(db: AsyncSession, scope: str) -> int:
    """The number after the highest one used in `scope`, for clients that do not number their requests.

    Raises `InvalidRequest` if the client itself used up the last number there is.
    """
    highest = await log.highest_seq(db, scope)
    if highest is not None and highest >= MAX_INT64:
        raise InvalidRequest("no seq_id is left in this model: the largest one was used", field="seq_id")
    return 1 if highest is None else highest + 1
