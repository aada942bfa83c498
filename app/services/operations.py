"""The life of an operation: accepted durably, run once, finished durably, its waiters woken.

Responsible for accepting exactly once under a natural key and for writing results beside the operation. Not
responsible for what an operation means (`training.py`, `weights.py`, `sampling.py`), for its order
(`workers/runtime.py`) or for delivery (`futures.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import decode_operation
from app.services.folders import Folders
from app.services.leases import LeaseLost, Leases
from app.services.paths import is_direct, session_of
from schemas.errors import EngineFailure, InvalidRequest, SeqIdConflict, TinsmithError, Unavailable
from schemas.fail_points import fail_point
from schemas.http.base import MAX_INT64
from schemas.operations import Operation, OperationResult, SampleDelta
from store import operations as log
from store.bodies import Bodies
from store.database import Store
from store.records import Body, BodyRef, NewOperation, OperationRecord
from store.snapshots import CHANGING
from store.usage import TokenKind, add_tokens
from workers.runtime_protocol import Runtime
from workers.tickets import QueueState, Ticket

logger = logging.getLogger(__name__)

WAITING_BODY = 1024
"""Bytes of a stored sample that are kept in memory while it waits: thousands of samples may wait, for minutes."""
Rows = Callable[[AsyncSession], Awaitable[None]]
"""Row changes that belong into the same transaction as the operation's own."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The encoded result of an operation and the rows that become true with it."""

    data: bytes
    content_type: str
    rows: Rows | None = None
    tokens: Mapping[TokenKind, int] = field(default_factory=dict)
    """What the operation used, counted with its result."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request on its way into the log.

    `digest` is of what the client sent, not of what the server drew (seeds, folders), so that a retry matches it.
    `body` is its canonical stored form. `model_id` is None for samples. `guard` runs in the transaction, only if the
    operation is new: what it raises refuses the request and leaves nothing behind.
    """

    project_id: str
    kind: str
    scope: str
    seq_id: int | None
    digest: str
    body: bytes
    runtime: Runtime
    model_id: str | None
    guard: Rows
    finish: Callable[[OperationResult], Finished]
    """Encodes the result; runs in a thread."""
    creates: bool = False
    """Whether this is request 0 of its model (`seq_id` then numbers the models of a session, not its requests)."""
    failed: Rows | None = None
    """Row changes that become true with a failure."""
    cleanup: Callable[[], Awaitable[None]] | None = None
    """Removes what a failed operation may have left on disk."""
    last: bool = False
    """Whether it runs after everything that the model has by now, whatever its own `seq_id`."""
    settled: Callable[[], None] | None = None
    """Called once a success is durable."""
    checkpoint_id: str | None = None
    """The checkpoint that a sample reads: it is kept until the sample is settled."""
    left_over: bool = False
    """Whether an earlier process accepted it."""
    progress: Callable[[SampleDelta], None] | None = None
    """Told what a sample draws while it runs, each token once; called in the event loop, and must return at once."""
    also: Callable[[OperationRecord, OperationResult], Rows] | None = None
    """Further rows that become true with the result and depend on the operation's place in the log; made in a
    thread."""
    reads: str | None = None
    """The checkpoint folder that it reads: it is on this machine before the operation is accepted, and stays."""
    writes: str | None = None
    """The checkpoint folder that it writes: it is kept before the result is recorded."""


@dataclass(frozen=True, slots=True)
class _Live:
    """An operation that a runtime has, or whose outcome is being recorded."""

    runtime: Runtime
    scope: str
    reads: str | None
    writes: str | None
    release: Callable[[], None]
    """Lets its folder go."""


class Operations:
    """Accepts operations and settles them.

    Args:
        folders: the checkpoint folders.
        new_id: makes request ids of at least 128 random bits.
        clock: the time, aware UTC.
        wake: called with a request id and its scope once its outcome is durable; scope None = not told.
        leases: where operations run, if several servers share the database; None = all of them here.
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
        leases: Leases | None = None,
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._folders = folders
        self._new_id = new_id
        self._clock = clock
        self._wake = wake
        self._leases = leases
        self._live: dict[str, _Live] = {}
        """By request id."""
        self._started: dict[str, datetime] = {}
        """When operations that a runtime has began to run, the last time if it had to begin again."""
        self._fences: dict[str, int] = {}
        """Under which fence of its run an operation was handed to a runtime, if runs change hands."""
        self._stopping = False
        self._unsettled: dict[str, tuple[OperationRecord, Submission, OperationResult | TinsmithError]] = {}

    def stopping(self) -> None:
        """The server is about to stop: what is not done stays in the log and runs after the restart."""
        self._stopping = True

    async def accept(self, submission: Submission) -> OperationRecord:
        """Make the operation durable, then hand it to its runtime; a repeat returns what the first one made.

        Goes on when the caller is cancelled: an operation that is in the log must reach its runtime.

        Raises:
            SeqIdConflict: the key was used with another body.
            Unavailable: the folder that it reads cannot be had now.
            TinsmithError: whatever `guard` raises.
        """
        return await asyncio.shield(asyncio.create_task(self._accept_with_folder(submission)))

    async def _accept_with_folder(self, submission: Submission) -> OperationRecord:
        with self._folders.held(submission.reads):
            if submission.reads is not None:
                await self._folders.bring(submission.reads)
            return await self._accept(submission)

    async def _accept(self, submission: Submission) -> OperationRecord:
        request_id = self._new_id()
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
                if self._leases is not None:
                    here = await self._leases.place(db, record, submission.model_id, submission.creates)
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
        if here:
            self.dispatch(record, submission)
        return record

    def dispatch(self, record: OperationRecord, submission: Submission) -> None:
        """Hand a logged operation to its runtime (also used for what an earlier process did not finish)."""
        reads, writes = submission.reads, submission.writes
        release = self._folders.hold(writes if reads is None else reads)
        self._live[record.request_id] = _Live(submission.runtime, record.scope, reads, writes, release)
        if self._leases is not None and submission.model_id is not None:
            self._fences[record.request_id] = self._leases.held.get(submission.model_id, 0)
        submission = replace(submission, body=b"")  # what waits is read back when it runs
        if submission.model_id is None and isinstance(record.body, bytes) and len(record.body) > WAITING_BODY:
            record = replace(record, body=b"")

        def started() -> None:
            self._started[record.request_id] = self._clock()

        async def load() -> Operation:
            return await self._folders.placed(await self._read_back(record))

        async def done(outcome: OperationResult | TinsmithError) -> None:
            await self._settle(record, submission, outcome)

        seq_id = None
        if submission.model_id is not None and not submission.last:
            seq_id = 0 if submission.creates else record.seq_id
            if submission.creates:
                submission.runtime.open_model(submission.model_id)
        submission.runtime.submit(
            Ticket(
                request_id=record.request_id,
                project_id=record.project_id,
                model_id=submission.model_id,
                seq_id=seq_id,
                load=load,
                done=done,
                started=started,
                is_step=record.kind == "optim_step",
                changes=record.kind in CHANGING,
                size=record.body.size if isinstance(record.body, BodyRef) else len(record.body),
                undo=submission.cleanup,
                progress=submission.progress,
                deaths=record.deaths,
                left_over=submission.left_over,
            )
        )

    async def read_logged(self, project_id: str, request_id: str) -> Operation:
        """An operation of the log, to be executed again.

        Raises `EngineFailure` if it cannot be read back, and what `Folders.placed` raises.
        """
        record = await self._store.read(lambda db: log.get_operation(db, project_id, request_id))
        if record is None:
            raise unreadable()
        return await self._folders.placed(await self._read_back(record))

    def waiting_to_settle(self) -> dict[str, TinsmithError | None]:
        """Outcomes that the store could not take yet, by request id: the error, or None for a success."""
        return {
            request_id: outcome if isinstance(outcome, TinsmithError) else None
            for request_id, (_, _, outcome) in self._unsettled.items()
        }

    async def _read_back(self, record: OperationRecord) -> Operation:
        try:
            if record.body == b"":
                stored = await self._store.read(lambda db: log.get_operation(db, record.project_id, record.request_id))
                record = stored or record
            data = await self._bodies.get(record.body)
            return await asyncio.to_thread(decode_operation, record.kind, data)
        except Exception as error:
            logger.exception("the stored request %s (%s) cannot be read back", record.request_id, record.kind)
            raise unreadable() from error

    def has(self, request_id: str) -> bool:
        """Whether a runtime of this server has the operation."""
        return request_id in self._live

    def queue_state(self, request_id: str) -> QueueState:
        """Why a pending operation is not done yet, in words for its client."""
        live = self._live.get(request_id)
        if live is None:
            return QueueState("active", None)
        doing = self._folders.doing(live.reads, live.writes)
        return live.runtime.waiting(request_id) if doing is None else QueueState("active", doing)

    def cancel(self, request_id: str) -> None:
        """Drop a sample, wherever it runs; ids that no runtime has are ignored."""
        if not self.cancel_here(request_id) and self._leases is not None:
            self._leases.tell_soon("cancelled", request=request_id)

    def cancel_here(self, request_id: str) -> bool:
        """Drop a sample if a runtime of this server has it; returns whether one has."""
        live = self._live.get(request_id)
        if live is not None:
            live.runtime.cancel(request_id)
        return live is not None

    def cancel_samples_of(self, session_id: str) -> None:
        """Drop the unfinished samples of a session that is over."""
        prefix = f"sampler:{session_id}:sample:"
        for request_id, live in list(self._live.items()):
            if live.scope.startswith(prefix):
                live.runtime.cancel(request_id)

    async def refuse(self, project_id: str, runtime: Runtime, model_id: str, scope: str, seq_id: int) -> None:
        """Record that a refused request used up `seq_id` of a model, so that later ones do not wait for it."""
        now = self._clock()

        async def rows(db: AsyncSession) -> None:
            await log.record_refusal(db, project_id, scope, seq_id, now)
            await self._tell(db, "refused", model=model_id, seq_id=seq_id)

        await self._store.write(rows)
        fail_point("refusal.recorded")
        runtime.note_refused(model_id, seq_id)

    async def fail_now(self, request_ids: list[str], error: TinsmithError) -> None:
        """Fail logged operations that no runtime knows (left over from an earlier process)."""

        async def rows(db: AsyncSession) -> None:
            for request_id in request_ids:
                await log.fail(db, request_id, error, self._clock())
                await self._tell(db, "settled", request=request_id, scope=None)

        await self._store.write(rows)
        for request_id in request_ids:
            self._wake(request_id, None)

    async def retry_unsettled(self) -> None:
        """Try again to write outcomes that the store could not take (disk full, for example)."""
        for record, submission, outcome in list(self._unsettled.values()):
            await self._settle(record, submission, outcome)

    async def _settle(
        self, record: OperationRecord, submission: Submission, outcome: OperationResult | TinsmithError
    ) -> None:
        request_id = record.request_id
        if self._stopping and isinstance(outcome, Unavailable):
            return
        try:
            error = (
                outcome if isinstance(outcome, TinsmithError) else await self._write_result(record, submission, outcome)
            )
        except LeaseLost:
            self._drop(request_id)
            return
        except Unavailable:
            # The work is done and must not be told to have failed, or its client would do it twice.
            logger.warning("the result of %s (%s) is written later: the store cannot take it", request_id, record.kind)
            self._unsettled[request_id] = (record, submission, outcome)
            return
        try:
            written = error is None or await self._write_failure(request_id, submission, error)
        except LeaseLost:
            self._drop(request_id)
            return
        if not written and error is not None:
            self._unsettled[request_id] = (record, submission, error)
            return
        self._unsettled.pop(request_id, None)
        if error is None and submission.settled is not None:
            submission.settled()
        self._close(request_id)

    def _close(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        self._started.pop(request_id, None)
        self._fences.pop(request_id, None)
        if live is not None:
            live.release()
        self._wake(request_id, None if live is None else live.scope)

    def _drop(self, request_id: str) -> None:
        """Forget an operation of a run that another server executes now: that one settles it."""
        logger.warning("request %s is left to the server that holds its run now", request_id)
        self._unsettled.pop(request_id, None)
        if (live := self._live.pop(request_id, None)) is not None:
            live.release()
        self._started.pop(request_id, None)
        self._fences.pop(request_id, None)

    async def _tell(self, db: AsyncSession, what: str, **about: Any) -> None:
        if self._leases is not None:
            await self._leases.tell(db, what, **about)

    async def _require(self, db: AsyncSession, request_id: str, submission: Submission) -> None:
        """Raise `LeaseLost` if another server executes the run of an operation now, or did since it was handed over."""
        if self._leases is not None and submission.model_id is not None:
            await self._leases.require(db, submission.model_id, self._fences.get(request_id))

    async def _write_result(
        self, record: OperationRecord, submission: Submission, outcome: OperationResult
    ) -> TinsmithError | None:
        """Write a result; returns the error to record instead when that can never be done.

        Raises `Unavailable` if the store cannot take it now.
        """
        request_id = record.request_id
        stored: Body = b""
        try:
            finished = await asyncio.to_thread(_finished, submission, record, outcome)
            if submission.writes is not None:
                await self._folders.publish(submission.writes)
            stored = await self._bodies.put(request_id, "result", finished.data)
            fail_point("result.before_row", submission.kind)
            await self._store.write(self._finish_rows(request_id, submission, finished, stored))
            fail_point("result.after_row", submission.kind)
        except (Unavailable, LeaseLost):
            await self._bodies.delete([stored])
            raise
        except TinsmithError as error:
            await self._bodies.delete([stored])
            return error
        except Exception:
            logger.exception("the result of %s (%s) could not be written", request_id, submission.kind)
            await self._bodies.delete([stored])
            return EngineFailure("the result could not be stored; see the server's log", hint=f"request {request_id}")
        return None

    def _finish_rows(self, request_id: str, submission: Submission, finished: Finished, stored: Body) -> Rows:
        now, started_at = self._clock(), self._started.get(request_id)

        async def rows(db: AsyncSession) -> None:
            await self._require(db, request_id, submission)
            if finished.rows is not None:
                await finished.rows(db)
            if not await log.finish(db, request_id, stored, finished.content_type, now, started_at=started_at):
                raise EngineFailure("this request was settled before")
            if finished.tokens:  # of a model or a sampler: the scope names it, and it names its session
                await add_tokens(
                    db,
                    project_id=submission.project_id,
                    session_id=_session(submission.scope),
                    base_model=submission.runtime.name,
                    tokens=finished.tokens,
                    now=now,
                )
            await self._tell(db, "settled", request=request_id, scope=submission.scope)

        return rows

    async def _write_failure(self, request_id: str, submission: Submission, error: TinsmithError) -> bool:
        """Write a failure; False if the store cannot take it now."""

        async def rows(db: AsyncSession) -> None:
            await self._require(db, request_id, submission)
            if submission.failed is not None:
                await submission.failed(db)
            await log.fail(db, request_id, error, self._clock(), started_at=self._started.get(request_id))
            await self._tell(db, "settled", request=request_id, scope=submission.scope)

        try:
            fail_point("failure.before_row", submission.kind)
            await self._store.write(rows)
            fail_point("failure.after_row", submission.kind)
            if submission.cleanup is not None:  # after it: the folder of a run that was taken over is not ours
                await submission.cleanup()
        except LeaseLost:
            raise
        except Exception:
            logger.exception("the failure of %s (%s) could not be written", request_id, submission.kind)
            return False
        return True


def resumed(
    record: OperationRecord,
    runtime: Runtime,
    model_id: str | None,
    finish: Callable[[OperationResult], Finished],
    **more: Any,
) -> Submission:
    """An accepted operation of an earlier process, as it was submitted there; `more` are further fields."""

    async def guard(db: AsyncSession) -> None:
        """Nothing to check: the operation is in the log already."""

    return Submission(
        project_id=record.project_id,
        kind=record.kind,
        scope=record.scope,
        seq_id=record.seq_id,
        digest=record.digest,
        body=b"",
        runtime=runtime,
        model_id=model_id,
        guard=guard,
        finish=finish,
        left_over=True,
        **more,
    )


def _session(scope: str) -> str:
    """The session that tokens are counted for; "" for a sample that belongs to none."""
    return "" if is_direct(scope) else session_of(scope.partition(":")[2])


def _finished(submission: Submission, record: OperationRecord, outcome: OperationResult) -> Finished:
    finished = submission.finish(outcome)
    if submission.also is None:
        return finished
    rows, also = finished.rows, submission.also(record, outcome)

    async def both(db: AsyncSession) -> None:
        if rows is not None:
            await rows(db)
        await also(db)

    return replace(finished, rows=both)


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
