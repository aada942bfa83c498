"""The database: opening it, one writer with group commit, readers beside it.

Every write goes through one task, so there is no contention and no "database is locked"; what waits together is made
durable by one fsync. Each write has a savepoint of its own, so a failing one leaves nothing behind and spoils nothing.
Not responsible for what is written: that is in the functions that callers pass in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from schemas.errors import TinsmithError, Unavailable
from store.connections import database_path, prepare_database, read_engine, write_engine
from store.files import claim_folder
from store.keys import PEPPER, load_pepper
from store.lock import FolderLock

T = TypeVar("T")
Work = Callable[[AsyncSession], Awaitable[T]]

_log = logging.getLogger(__name__)


class _Job:
    """One write that waits for its commit: the function, and the future of its caller."""

    __slots__ = ("error", "future", "value", "work")

    def __init__(self, work: Work[Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future
        self.value: Any = None
        self.error: Exception | None = None

    def resolve(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)

    def refuse(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Store:
    """An open data folder. Made by `open`, ended by `close`.

    Args of `open`:
        data_dir: created with mode 0700 if it is missing; one that is empty or ours is made so.
        url: another place for the database, `sqlite+aiosqlite:///PATH`; by default `data_dir/tinsmith.db`.
    """

    MAX_BATCH = 256
    MAX_BATCH_SECONDS = 0.05
    """How much may share one commit: enough to spare fsyncs, not so much that the first of them waits long."""
    READERS = 4

    def __init__(self, path: Path, pepper: bytes, lock: FolderLock) -> None:
        self._info = {PEPPER: pepper}
        self._lock = lock
        self._writes: AsyncEngine = write_engine(path)
        self._reads: AsyncEngine = read_engine(path, self.READERS)
        self._read_slots = asyncio.Semaphore(self.READERS)
        self._jobs: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._open = True
        self._writer = asyncio.create_task(self._run(), name="store-writer")

    @classmethod
    async def open(cls, data_dir: Path, url: str | None = None) -> Self:
        """Create or open a data folder and bring its schema up to date.

        Raises:
            InvalidRequest: the URL is of a kind that is not supported.
            Unavailable: another server uses the folder; its schema is newer than this version; or it cannot be used.
        """
        path = database_path(data_dir, url)
        lock: FolderLock | None = None
        try:
            await asyncio.to_thread(claim_folder, data_dir, path.name)
            lock = FolderLock(data_dir)
            existed = path.exists()
            pepper = await asyncio.to_thread(load_pepper, data_dir, expected=existed)
            await asyncio.to_thread(prepare_database, path)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | SQLAlchemyError):
                raise Unavailable(f"the data folder cannot be used ({_reason(error)})") from error
            raise
        return cls(path, pepper, lock)

    async def write(self, work: Work[T]) -> T:
        """Run `work` in the writer's transaction. When this returns, what it wrote is on disk.

        `work` gets a session with a savepoint of its own and does database work only: no files, no compute, no other
        `write`, no commit of its own. Everything else waits for it. Its own exception comes back as it is, and nothing
        that it wrote is kept.

        Raises:
            Unavailable: the store is closed, or the database could not commit; nothing was kept then.
        """
        if asyncio.current_task() is self._writer:
            raise RuntimeError("a write inside a write would wait for itself")
        if not self._open:
            raise Unavailable("the server is shutting down")
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._jobs.put_nowait(job)
        result: T = await job.future
        return result

    async def read(self, work: Work[T]) -> T:
        """Run `work` on a consistent, read-only view of what is committed. Never waits for the writer.

        Raises:
            Unavailable: the store is closed, or the database cannot be read.
        """
        if not self._open:
            raise Unavailable("the server is shutting down")
        async with self._read_slots, AsyncSession(self._reads, info=self._info) as db:
            try:
                return await work(db)
            except OperationalError as error:
                raise _unavailable("read", error) from error

    async def close(self) -> None:
        """Finish the writes that were accepted, then let go of the folder. Closing again does nothing."""
        if not self._open:
            return
        self._open = False
        self._jobs.put_nowait(None)
        try:
            await self._writer
            for _ in range(self.READERS):  # let the reads end that are under way
                await self._read_slots.acquire()
        finally:
            await self._reads.dispose()
            await self._writes.dispose()
            self._lock.release()

    async def _run(self) -> None:
        try:
            while (first := await self._jobs.get()) is not None:
                await self._commit(first)
        finally:
            self._open = False
            while not self._jobs.empty():
                if (job := self._jobs.get_nowait()) is not None:
                    job.refuse(Unavailable("the server is shutting down"))

    async def _commit(self, first: _Job) -> None:
        """Run the first job and those that wait behind it in one transaction; resolve them after its commit."""
        batch: list[_Job] = []
        until = time.monotonic() + self.MAX_BATCH_SECONDS
        try:
            async with self._writes.begin() as connection:
                job: _Job | None = first
                while job is not None:
                    if not job.future.cancelled():
                        batch.append(job)
                        await self._attempt(job, connection)
                    full = len(batch) >= self.MAX_BATCH or time.monotonic() >= until
                    job = None if full else self._next()
        except Exception as error:
            failure = _unavailable("written", error)
            for job in batch or [first]:
                job.refuse(failure if job.error is None else job.error)
        except BaseException:
            for job in batch or [first]:
                job.refuse(Unavailable("the server is shutting down"))
            raise
        else:
            for job in batch:
                job.resolve()

    def _next(self) -> _Job | None:
        if self._jobs.empty():
            return None
        job = self._jobs.get_nowait()
        if job is None:  # close() was called: leave its mark for the outer loop
            self._jobs.put_nowait(None)
        return job

    async def _attempt(self, job: _Job, connection: AsyncConnection) -> None:
        """Run one job in a savepoint. Its failure is its own, unless the whole transaction is gone with it."""
        session = AsyncSession(
            connection, join_transaction_mode="create_savepoint", expire_on_commit=False, info=self._info
        )
        try:
            async with session as db, db.begin():
                job.value = await job.work(db)
        except Exception as error:
            # SQLite ends the transaction by itself when the disk is full or fails; then no job of the batch was kept.
            raw = (await connection.get_raw_connection()).driver_connection
            if raw is None or not raw.in_transaction:
                raise
            job.error = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            job.error = RuntimeError("the work of a write was cancelled from inside")


def _unavailable(done: str, error: Exception) -> TinsmithError:
    _log.error("the database could not be %s: %s", done, _reason(error), exc_info=error)
    return Unavailable(f"the server's database cannot be {done} right now", code="database_unavailable")


def _reason(error: Exception) -> str:
    """The kind of an error in words that hold no path, no statement and no value."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    original = getattr(error, "orig", None)
    return str(original) if original is not None else type(error).__name__
