"""A data folder seen from outside: read without changing anything, whether a server is running on it or not.

For tools such as `tinsmith doctor` and `tinsmith backup`. Blocking, and without SQLAlchemy's machinery. Not responsible
for what the tools conclude.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from schemas.errors import Unavailable
from store.connections import database_path
from store.migrate import known_schemas, newer_schema
from store.postgres import is_postgres
from store.read_only_postgres import NoSuchTable, open_postgres
from store.records import BodyRef

_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A row of a checkpoint, as far as its files go; `size_bytes` is of all files of the folder."""

    checkpoint_id: str
    model_id: str
    kind: str
    name: str | None
    folder: str
    size_bytes: int
    encrypted: bool

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.model_id}/{self.kind}/{self.name}" if self.name else f"{self.model_id}/{self.kind} (unnamed)"


def running_server(data_dir: Path) -> str | None:
    """The process id of the server that uses the folder, in words; None if there is none.

    Takes the folder's lock for an instant to find out.
    """
    try:
        descriptor = os.open(data_dir / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None


class Reader(Protocol):
    """A connection, of either database, as the functions below use it."""

    def execute(self, query: str, /) -> Iterable[Any]:
        """The rows of a query."""
        ...


@contextmanager
def open_reader(data_dir: Path, url: str | None) -> Iterator[Reader]:
    """A connection that cannot write to the database of a data folder; `url` None or of SQLite: the file in it.

    Raises `Unavailable` as `open_database` and `open_postgres`.
    """
    if url is not None and is_postgres(url):
        with open_postgres(url) as reader:
            yield reader
    else:
        with open_database(data_dir) as connection:
            yield connection


@contextmanager
def open_database(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write, in one read transaction: everything that is read belongs to one moment.

    Leaves the folder as it is. Beside a running server the database itself is read. Without one, SQLite would have to
    write beside the file to take in what a killed server left in its log, so a private copy is read then.

    Raises:
        Unavailable: there is no database, or it cannot be read.
    """
    path = database_path(data_dir, None)
    if not path.is_file() and (data_dir / "pepper").is_file():
        raise Unavailable(
            f"{path.name} is not in the data folder: its rows are in another database",
            hint="give `tinsmith doctor` its database_url; for a backup of PostgreSQL stop the servers, run pg_dump, "
            "and copy the folder with cp -a (docs/postgres.md)",
            code="database_elsewhere",
        )
    if not path.is_file():
        raise Unavailable(
            f"there is no data folder: {path.name} is missing",
            hint="give the folder that `tinsmith serve` was given with --data-dir",
            code="no_data_folder",
        )
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(closing(_connect(path, running_server(data_dir) is not None, stack)))
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the moment is now
        except (sqlite3.Error, OSError) as error:
            raise unreadable(error) from error
        yield connection


def unreadable(error: Exception) -> Unavailable:
    """The error of a database that SQLite cannot read."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return Unavailable(f"the database cannot be read ({reason or type(error).__name__})", code="database_unavailable")


def _connect(path: Path, running: bool, stack: ExitStack) -> sqlite3.Connection:
    log = path.with_name(f"{path.name}-wal")
    if running:
        options = "mode=ro"
    elif log.exists() and log.stat().st_size:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-")))
        for source in (path, log):
            shutil.copyfile(source, private / source.name)
        path, options = private / path.name, "mode=rw"
    else:
        options = "mode=ro&immutable=1"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}", uri=True, timeout=_WAIT_SECONDS, isolation_level=None
    )
    connection.execute("PRAGMA query_only=ON")
    return connection


def schema_of(connection: Reader) -> str | None:
    """The version of the schema; None if the database has none."""
    try:
        rows = list(connection.execute("SELECT version_num FROM alembic_version"))
    except (sqlite3.OperationalError, NoSuchTable):
        return None
    return str(rows[0][0]) if rows else None


def require_known_schema(connection: Reader) -> None:
    """Raise `Unavailable` (`newer_schema`) for a database that a newer version wrote."""
    found = schema_of(connection)
    if found is not None and found not in known_schemas():
        raise newer_schema(found)


def checkpoint_files(connection: Reader) -> list[CheckpointFiles]:
    """Every checkpoint that has a row."""
    columns = "checkpoint_id, model_id, kind, name, folder, size_bytes, encrypted"
    rows = connection.execute(f"SELECT {columns} FROM checkpoints ORDER BY created_at")
    return [
        CheckpointFiles(checkpoint_id, model_id, kind, name, folder, size_bytes, bool(encrypted))
        for checkpoint_id, model_id, kind, name, folder, size_bytes, encrypted in rows
    ]


def body_files(connection: Reader) -> dict[str, BodyRef]:
    """Every body that is in a file, by the file's name."""
    rows = connection.execute(
        "SELECT body_ref, result_ref FROM operations WHERE body_ref IS NOT NULL OR result_ref IS NOT NULL"
    )
    refs = [BodyRef(**json.loads(text)) for row in rows for text in row if text is not None]
    return {ref.name: ref for ref in refs}


def snapshot_files(connection: Reader) -> dict[str, BodyRef]:
    """Every snapshot of a live run, by its file's name. Older schemas have none."""
    try:
        rows = list(connection.execute("SELECT file, size_bytes, sha256 FROM snapshots"))
    except sqlite3.OperationalError:
        return {}
    return {file: BodyRef(file, size, sha256) for file, size, sha256 in rows}
