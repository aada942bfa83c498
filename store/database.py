"""The database: opening it, one writer with group commit, readers beside it.

Every write of a server goes through one task, so there is no contention and no "database is locked"; what waits
together is made durable by one fsync. Each write has a savepoint of its own, so a failing one leaves nothing behind and
spoils nothing. On PostgreSQL other servers write too: a write that meets one of them runs again, in a transaction of
its own. Not responsible for what is written: that is in the functions that callers pass in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from schemas.errors import TinsmithError, Unavailable
from store.backend import Backend, SqliteBackend
from store.connections import database_path, prepare_database
from store.files import claim_folder
from store.holding import WRITING
from store.keys import PEPPER, load_pepper
from store.lock import FolderLock
from store.postgres import PostgresBackend, is_postgres, parse_postgres, starting

T = TypeVar("T")
Work = Callable[[AsyncSession], Awaitable[T]]

_log = logging.getLogger(__name__)


class _Job:
    """One write that waits for its commit: the function, and the future of its caller.

    `met` is when another server's write was in its way for the first time; `again`: it is to run again for that.
    """

    __slots__ = ("again", "error", "future", "met", "value", "work")

    def __init__(self, work: Work[Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future
        self.met: float | None = None
        self.again = False
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
        url: another place for the database, `sqlite+aiosqlite:///PATH` or `postgresql+asyncpg://...`; by default
            `data_dir/tinsmith.db`.
    """

    MAX_BATCH = 256
    MAX_BATCH_SECONDS = 0.05
    """How much may share one commit: enough to spare fsyncs, not so much that the first of them waits long."""
    READERS = 4
    MEETING_SECONDS = 10.0
    """For how long a write that meets those of another server is run again before it fails."""
    ASK_SECONDS = 0.5
    """Pause between two questions to a database that does not answer whether it has committed."""

    def __init__(self, backend: Backend, pepper: bytes, lock: FolderLock) -> None:
        self._info = {PEPPER: pepper}
        self._lock = lock
        self._backend = backend
        self._writes: AsyncEngine = backend.writes
        self._reads: AsyncEngine = backend.reads
        self._read_slots = asyncio.Semaphore(self.READERS)
        self._jobs: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._again: deque[_Job] = deque()
        self._in_doubt = False
        """The answer to a commit was lost, and the database cannot be asked yet."""
        self._open = True
        self.on_commit: Callable[[int, float], None] | None = None
        """Told of each transaction: how many writes were in it, and the seconds from its beginning to the disk."""
        self._writer = asyncio.create_task(self._run(), name="store-writer")

    @classmethod
    async def open(cls, data_dir: Path, url: str | None = None) -> Self:
        """Create or open a data folder and bring its schema up to date.

        Raises:
            InvalidRequest: the URL is of a kind that is not supported.
            Unavailable: another server uses the folder; its schema is newer than this version; or it cannot be used.
        """
        lock: FolderLock | None = None
        try:
            if url is not None and is_postgres(url):
                parsed = parse_postgres(url)
                await asyncio.to_thread(claim_folder, data_dir, "pepper")
                lock = FolderLock(data_dir, shared=True)
                async with starting(parsed, migrate=True):
                    pepper = await asyncio.to_thread(load_pepper, data_dir, expected=False)
                return cls(PostgresBackend(parsed, cls.READERS), pepper, lock)
            path = database_path(data_dir, url)
            await asyncio.to_thread(claim_folder, data_dir, path.name)
            lock = FolderLock(data_dir)
            existed = path.exists()
            pepper = await asyncio.to_thread(load_pepper, data_dir, expected=existed)
            await asyncio.to_thread(prepare_database, path)
            return cls(SqliteBackend(path, cls.READERS), pepper, lock)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | SQLAlchemyError) or _is_driver_error(error):
                what = "database" if is_postgres(url) else "data folder"
                raise Unavailable(f"the {what} cannot be used ({_reason(error)})") from error
            raise

    @property
    def shared(self) -> URL | None:
        """Where a database is that other servers may use too; None: this server has its database to itself."""
        return self._backend.url if isinstance(self._backend, PostgresBackend) else None

    @property
    def writes_waiting(self) -> int:
        """How many writes no transaction has taken yet."""
        return self._jobs.qsize() + len(self._again)

    @asynccontextmanager
    async def setting_up(self) -> AsyncIterator[None]:
        """One server at a time sets up what all that share the database have in common. Alone it need not wait.

        Raises `Unavailable` if the database cannot be used.
        """
        if self.shared is None:
            yield
            return
        async with starting(self.shared, migrate=False):
            yield

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
        if self._in_doubt:
            raise Unavailable("the server's database cannot be written right now", code="database_unavailable")
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
            return await self._reading(work, db)

    async def look_up(self, work: Work[T]) -> T:
        """As `read`, for a few rows by their keys: every request does that, so it neither waits for a connection nor
        changes threads where the database is a file. What may take longer than a millisecond is for `read`.
        """
        if self._backend.lookups is None:
            return await self.read(work)
        if not self._open:
            raise Unavailable("the server is shutting down")
        db = AsyncSession(self._backend.lookups, info=self._info)
        try:
            return await self._reading(work, db)
        finally:
            await db.close()  # not as a context: that would close it in a task, a turn of the event loop later

    async def _reading(self, work: Work[T], db: AsyncSession) -> T:
        try:
            return await work(db)
        except Exception as error:
            if self._backend.unavailable(error):
                raise _unavailable("read", error) from error
            raise self._backend.refusal(error) or error from None

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
            await self._backend.close()
            self._lock.release()

    async def _run(self) -> None:
        try:
            closing = False
            while not closing or self._again:
                for _ in range(len(self._again)):  # once each, so that what they wait for cannot hold up the others
                    await self._commit(self._again.popleft())
                if self._again and self._jobs.empty():
                    continue
                first = None if closing else await self._jobs.get()
                if first is None:
                    closing = True
                else:
                    await self._commit(first)
        finally:
            self._open = False
            left = [*self._again, *(self._jobs.get_nowait() for _ in range(self._jobs.qsize()))]
            for job in left:
                if job is not None:
                    job.refuse(Unavailable("the server is shutting down"))

    async def _commit(self, first: _Job) -> None:
        """Run the first job and those that wait behind it in one transaction; resolve them after its commit."""
        batch: list[_Job] = []
        mark: Any = None
        began = time.monotonic()
        try:
            async with self._writes.begin() as connection:
                await self._fill(connection, first, batch)
                mark = await self._backend.mark(connection)
        except Exception as error:
            kept = None if mark is None else await self._find_out(mark)
            if kept:
                self._resolve(batch)
            elif kept is None and mark is not None:
                for job in batch:  # nobody knows: whoever reads the log after the next start does
                    job.future.cancel()
            else:
                failure = _unavailable("written", error)
                for job in batch or self._without_connection(first):
                    job.refuse(failure if job.error is None else job.error)
        except BaseException:
            for job in batch or [first]:
                job.refuse(Unavailable("the server is shutting down"))
            raise
        else:
            if self.on_commit is not None:
                self.on_commit(len(batch), time.monotonic() - began)
            self._resolve(batch)

    async def _fill(self, connection: AsyncConnection, first: _Job, batch: list[_Job]) -> None:
        """Run jobs until nothing waits or the transaction is large enough."""
        until = time.monotonic() + self.MAX_BATCH_SECONDS
        alone = first.met is not None
        job: _Job | None = first
        while job is not None:
            if not job.future.cancelled():
                batch.append(job)
                await self._attempt(job, connection)
            full = alone or len(batch) >= self.MAX_BATCH or time.monotonic() >= until
            job = None if full else self._next()

    def _resolve(self, batch: list[_Job]) -> None:
        for job in batch:
            if job.again:
                job.again = False
                self._again.append(job)
            else:
                job.resolve()

    async def _find_out(self, mark: Any) -> bool | None:
        """Whether a transaction was committed whose answer was lost, as soon as the database says; None: not before
        the end of the server."""
        self._in_doubt = True
        try:
            while self._open:
                try:
                    known = await self._backend.committed(mark)
                    if known is not None:
                        return known
                except Exception as error:
                    _log.warning("it is not known yet whether a transaction was committed: %s", _reason(error))
                await asyncio.sleep(self.ASK_SECONDS)
            return None
        finally:
            self._in_doubt = False

    def _without_connection(self, first: _Job) -> list[_Job]:
        """Whom to refuse when a transaction could not even begin. To find that out again for each who waits would take
        seconds each; SQLite's lock is worth another try."""
        refused = [first]
        while self.shared is not None and (job := self._next()) is not None:
            refused.append(job)
        return refused

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
            connection,
            join_transaction_mode="create_savepoint",
            expire_on_commit=False,
            info={**self._info, WRITING: True},
        )
        try:
            async with session as db, db.begin():
                job.value = await job.work(db)
        except Exception as error:
            if not await self._backend.in_transaction(connection, error):
                raise
            if self._backend.met_another(error):
                job.met = job.met or time.monotonic()
                job.again = time.monotonic() < job.met + self.MEETING_SECONDS
                if job.again:
                    return
            job.error = self._backend.refusal(error) or error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            job.error = RuntimeError("the work of a write was cancelled from inside")


def _unavailable(done: str, error: Exception) -> TinsmithError:
    _log.error("the database could not be %s: %s", done, _reason(error), exc_info=error)
    return Unavailable(f"the server's database cannot be {done} right now", code="database_unavailable")


def _is_driver_error(error: BaseException) -> bool:
    """Whether it comes from PostgreSQL's driver as it is: so do failures to connect."""
    return type(error).__module__.partition(".")[0] == "asyncpg"


def _reason(error: BaseException) -> str:
    """The kind of an error in words that hold no path, no statement and no value."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    original = getattr(error, "orig", None)
    if original is None:
        return str(error) if _is_driver_error(error) else type(error).__name__
    return str(original)
