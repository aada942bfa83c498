"""The end of an operation: its outcome is recorded with everything that becomes true with it, and its waiters woken.

An outcome that the store cannot take is kept and written later, so that work is never told to have failed that was
done. Not responsible for accepting operations or for running them (`operations.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.folders import Folders
from app.services.held import HeldBack
from app.services.leases import LeaseLost, Leases
from app.services.limit_charges import check_storage
from app.services.observing import Observer
from app.services.paths import is_direct, session_of
from app.services.submission import Finished, Rows, Submission, Timing
from app.services.tenant_limits import Effective, TenantLimits
from app.services.usage import cancelled_tokens
from schemas.errors import Cancelled, EngineFailure, TinsmithError, Unavailable
from schemas.fail_points import fail_point
from schemas.operations import OperationResult
from store import operations as log
from store import runs
from store.bodies import Bodies
from store.database import Store
from store.records import Body, OperationRecord
from store.usage import TokenKind, add_tokens
from workers.runtime_protocol import Runtime

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Live:
    """An operation that a runtime has, or whose outcome is being recorded."""

    runtime: Runtime
    scope: str
    reads: str | None
    writes: str | None
    release: Callable[[], None]
    """Lets its folder go."""
    fence: int | None = None
    """Under which fence of its run it was handed to the runtime, if runs change hands."""
    started: datetime | None = None
    """When it began to run, the last time if it had to begin again."""
    weight: float | None = None
    """What it was weighed as (`Measure.weigh`)."""


class Settling:
    """Records the outcomes of operations.

    Args:
        folders: the checkpoint folders.
        clock: the time, aware UTC.
        wake: called with a request id and its scope once its outcome is durable; scope None = not told.
        limits: of projects and keys.
        held: what limits hold back; told of each end.
        live: what runtimes have, by request id. Whoever hands an operation to a runtime puts it there; it is taken out
            here, with its end.
        leases: where operations run, if several servers share the database; None = all of them here.
        observers: who measures.
    """

    def __init__(
        self,
        store: Store,
        bodies: Bodies,
        *,
        folders: Folders,
        clock: Callable[[], datetime],
        wake: Callable[[str, str | None], None],
        limits: TenantLimits,
        held: HeldBack,
        live: dict[str, Live],
        leases: Leases | None,
        observers: Sequence[Observer],
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._folders = folders
        self._clock = clock
        self._wake = wake
        self._limits = limits
        self._held = held
        self._live = live
        self._leases = leases
        self._observers = observers
        self._stopping = False
        self._unsettled: dict[str, tuple[OperationRecord, Submission, OperationResult | TinsmithError]] = {}

    def stopping(self) -> None:
        """The server is about to stop: what is not done stays in the log."""
        self._stopping = True

    async def fail_now(self, request_ids: list[str], error: TinsmithError) -> None:
        """Fail logged operations that no runtime knows (left over from an earlier process)."""

        async def rows(db: AsyncSession) -> None:
            for request_id in request_ids:
                await log.fail(db, request_id, error, self._clock())
                await self._tell(db, "settled", request=request_id, scope=None)

        await self._store.write(rows)
        for request_id in request_ids:
            self._wake(request_id, None)

    def waiting_to_settle(self) -> dict[str, TinsmithError | None]:
        """Outcomes that the store could not take yet, by request id: the error, or None for a success."""
        return {
            request_id: outcome if isinstance(outcome, TinsmithError) else None
            for request_id, (_, _, outcome) in self._unsettled.items()
        }

    async def retry_unsettled(self) -> None:
        """Try again to write outcomes that the store could not take (disk full, for example)."""
        for record, submission, outcome in list(self._unsettled.values()):
            await self.settle(record, submission, outcome)

    async def settle(
        self, record: OperationRecord, submission: Submission, outcome: OperationResult | TinsmithError
    ) -> None:
        """Record what came of an operation, then let its folder go and wake who waits for it.

        What the store cannot take now is kept, for `retry_unsettled`.
        """
        request_id = record.request_id
        if self._stopping and isinstance(outcome, Unavailable):
            return
        for observer in self._observers:
            observer.computed(request_id)
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
        for observer in self._observers:
            observer.settled(request_id, None if error is None else error.code)
        if error is None and submission.settled is not None:
            submission.settled()
        self._close(request_id)

    def _close(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.release()
        self._held.freed()
        self._wake(request_id, None if live is None else live.scope)

    def _drop(self, request_id: str) -> None:
        """Forget an operation of a run that another server executes now: that one settles it."""
        logger.warning("request %s is left to the server that holds its run now", request_id)
        for observer in self._observers:
            observer.dropped(request_id)
        self._unsettled.pop(request_id, None)
        if (live := self._live.pop(request_id, None)) is not None:
            live.release()

    async def _tell(self, db: AsyncSession, what: str, **about: Any) -> None:
        if self._leases is not None:
            await self._leases.tell(db, what, **about)

    async def _require(self, db: AsyncSession, request_id: str, submission: Submission) -> None:
        """Raise `LeaseLost` if another server executes the run of an operation now, or did since it was handed over."""
        if self._leases is not None and submission.model_id is not None:
            live = self._live.get(request_id)
            await self._leases.require(db, submission.model_id, None if live is None else live.fence)

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
            effective = None if submission.writes is None else await self._limits_of_run(submission)
            await self._store.write(self._finish_rows(record, submission, outcome, finished, stored, effective))
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

    async def _limits_of_run(self, submission: Submission) -> Effective | None:
        """What applies to the checkpoints of a run: the limits of its project, and of the key that made it."""
        model_id = submission.model_id or ""
        key_id = await self._store.look_up(lambda db: runs.key_of_run(db, model_id))
        return await self._limits.effective(submission.project_id, key_id)

    def _finish_rows(
        self,
        record: OperationRecord,
        submission: Submission,
        outcome: OperationResult,
        finished: Finished,
        stored: Body,
        effective: Effective | None,
    ) -> Rows:
        request_id = record.request_id
        live = self._live.get(request_id)
        now, started_at = self._clock(), None if live is None else live.started
        measured: Rows | None = None
        if submission.measure is not None:
            timing = Timing(record.created_at, started_at, now)
            measured = submission.measure.rows(record, outcome, None if live is None else live.weight, timing)

        async def rows(db: AsyncSession) -> None:
            await self._require(db, request_id, submission)
            if finished.rows is not None:
                await finished.rows(db)
            if effective is not None:  # of a checkpoint
                await check_storage(db, effective)
            if not await log.finish(
                db,
                request_id,
                stored,
                finished.content_type,
                now,
                started_at=started_at,
                tokens=finished.tokens,
            ):
                raise EngineFailure("this request was settled before")
            await _count(db, submission, finished.tokens, now)
            if measured is not None:
                await measured(db)
            await self._tell(db, "settled", request=request_id, scope=submission.scope)

        return rows

    async def _write_failure(self, request_id: str, submission: Submission, error: TinsmithError) -> bool:
        """Write a failure, with what a cancelled sample has used; False if the store cannot take it now."""
        tokens = cancelled_tokens(submission.cost.prompt, error) if isinstance(error, Cancelled) else None

        async def rows(db: AsyncSession) -> None:
            await self._require(db, request_id, submission)
            if submission.failed is not None:
                await submission.failed(db)
            live = self._live.get(request_id)
            started_at, now = None if live is None else live.started, self._clock()
            if await log.fail(db, request_id, error, now, started_at=started_at, tokens=tokens) and tokens:
                await _count(db, submission, tokens, now)
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


async def _count(db: AsyncSession, submission: Submission, tokens: Mapping[TokenKind, int], now: datetime) -> None:
    """Count what an operation of a model or a sampler used: its scope names that, and it names its session."""
    await add_tokens(
        db,
        project_id=submission.project_id,
        session_id=_session(submission.scope),
        base_model=submission.runtime.name,
        tokens=tokens,
        now=now,
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
