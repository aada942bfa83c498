"""`tinsmith doctor`: whether a data folder is whole. Reads every byte that matters, changes nothing, blocks.

Works beside a running server and on a copy. Files and rows are compared twice: what a running server removed or
finished between the two looks is no finding. Not responsible for the machine (`app/doctor_machine.py`) or for mending.
"""

from __future__ import annotations

import hashlib
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from app.checks import Check, megabytes
from app.services.age_encryption import SUFFIX
from app.services.exports import EXPORTED_FILES
from engines.checkpoint_files import folder_problems
from schemas.errors import InvalidRequest, Unavailable
from store.artifact_place import recorded_place
from store.migrate import known_schemas, newer_schema
from store.read_only import (
    CheckpointFiles,
    Reader,
    body_files,
    checkpoint_files,
    open_reader,
    running_server,
    schema_of,
    snapshot_files,
)
from store.read_only_postgres import PostgresReader
from store.records import BodyRef

SECRET_BYTES = {"pepper": 32, "url_secret": 32, "token_secret": 32}
YOUNG_SECONDS = 600
"""How long a running server may take to write the row of a file that is there already."""

Tell = Callable[[str], None]
Opened = Callable[[], AbstractContextManager[Reader]]
T = TypeVar("T")


def check_data_folder(
    data_dir: Path, tell: Tell = lambda line: None, *, database_url: str | None = None
) -> list[Check]:
    """Every check of a data folder, in the order of the table. `tell` is called with lines of progress.

    `database_url`: as the server's setting; the rows of a data folder may be in PostgreSQL.
    """
    running = running_server(data_dir)
    checks = []
    opened = partial(open_reader, data_dir, database_url)
    try:
        with opened() as connection:
            used = None
            if isinstance(connection, PostgresReader):
                used = f"its database is in use by {connection.servers()} servers"
                running = used if connection.servers() else running
            checks.append(_folder(data_dir, running, used))
            tell("checking the database")
            checks.append(_database(connection))
            checks.append(_schema(connection))
            tell("checking files")
            if all(check.status != "fail" for check in checks[1:]):
                rows = checkpoint_files(connection), body_files(connection), snapshot_files(connection)
            else:
                rows = None
    except (Unavailable, InvalidRequest) as error:
        checks = checks or [_folder(data_dir, running)]
        return [*checks, Check("database", "fail", error.message, () if error.hint is None else (error.hint,))]
    except sqlite3.Error as error:
        return [*checks, Check("database", "fail", f"the database is damaged ({error})")]
    checks.append(_secrets(data_dir))
    if rows is not None:
        checkpoints, bodies, snapshots = rows
        checks.append(_checkpoints(data_dir, checkpoints, tell, opened))
        lost = "these requests or results are lost"
        checks.append(_files(data_dir, "bodies", bodies, body_files, lost, tell, opened))
        lost = "training goes on from an earlier one after a crash"
        checks.append(_files(data_dir, "snapshots", snapshots, snapshot_files, lost, tell, opened))
        checks.append(_strays(data_dir, running is not None, opened))
    return checks


def _folder(data_dir: Path, running: str | None, used: str | None = None) -> Check:
    alone = f"in use by the server with process id {running}" if running else "no server is running on it"
    used = used or alone
    try:
        mode = stat.S_IMODE(data_dir.stat().st_mode)
    except OSError as error:
        return Check("data folder", "fail", f"it cannot be looked into ({error.strerror})")
    if mode & 0o077:
        return Check("data folder", "warn", f"{used}; others on this machine may look into it (mode {mode:04o})")
    return Check("data folder", "ok", used)


def _database(reader: Reader) -> Check:
    if isinstance(reader, PostgresReader):
        return Check("database", "ok", f"PostgreSQL answers, {megabytes(reader.size())}; it checks itself")
    connection = cast(sqlite3.Connection, reader)
    found = tuple(str(row[0]) for row in connection.execute("PRAGMA integrity_check(100)") if row[0] != "ok")
    if found:
        return Check("database", "fail", "SQLite finds it damaged; restore a backup", found)
    broken = tuple(
        f"{table}: row {row} names a row of {parent} that is not there"
        for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check")
    )
    if broken:
        return Check("database", "fail", "rows name others that do not exist", broken)
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return Check("database", "ok", f"whole, {megabytes(pages * size)}")


def _schema(connection: Reader) -> Check:
    found, known = schema_of(connection), known_schemas()
    if found is None:
        return Check("schema", "fail", "it is not a database of this server")
    if found not in known:
        error = newer_schema(found)
        return Check("schema", "fail", error.message, (error.hint or "",))
    later = "" if found == known[0] else f"; the next start brings it to {known[0]}"
    return Check("schema", "ok", f"version {found}{later}")


def _secrets(data_dir: Path) -> Check:
    problems = []
    for name in (*SECRET_BYTES, "dev_key"):
        try:
            status = (data_dir / name).lstat()
        except FileNotFoundError:
            if name == "pepper":
                problems.append("pepper is missing: API keys do not work any more")
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_size != SECRET_BYTES.get(name, status.st_size):
            problems.append(f"{name} is damaged")
        elif stat.S_IMODE(status.st_mode) & 0o077:
            problems.append(f"{name} can be read by others on this machine")
    if not problems:
        return Check("keys", "ok", "as they should be")
    wrong = any(problem.startswith("pepper") for problem in problems)
    return Check("keys", "fail" if wrong else "warn", "not as they should be", tuple(problems))


# -- files that rows name --------------------------------------------------------------------------------------------
def _checkpoints(data_dir: Path, rows: list[CheckpointFiles], tell: Tell, opened: Opened) -> Check:
    place = recorded_place(data_dir)
    named, found = rows, dict[str, str]()
    if place is not None:
        rows = [row for row in rows if (data_dir / "checkpoints" / row.folder).is_dir()]
    for row in _paced(rows, tell, "checkpoints"):
        problems = _checkpoint_problems(data_dir / "checkpoints" / row.folder, row)
        if problems:
            found[row.folder] = f"{row.title}: {'; '.join(problems)}"
    if found:
        with opened() as connection:
            still = {row.folder for row in checkpoint_files(connection)}
        found = {folder: text for folder, text in found.items() if folder in still}
    if found and place is not None:
        detail = f"{len(found)} of {len(rows)} copies cannot be used; remove their folders, and they are fetched again"
        return Check("checkpoints", "fail", detail, tuple(found.values()))
    if found:
        detail = f"{len(found)} of {len(rows)} cannot be used; delete them, or restore them from a backup"
        return Check("checkpoints", "fail", detail, tuple(found.values()))
    size = megabytes(sum(row.size_bytes for row in rows))
    if place is not None:
        away = f"{len(named)} in {place}, not looked at there; {len(rows)} copies here"
        return Check("checkpoints", "ok", f"{away}, {size}, every file has its checksum")
    return Check("checkpoints", "ok", f"{len(rows)}, {size}, every file has its checksum")


def _checkpoint_problems(folder: Path, row: CheckpointFiles) -> list[str]:
    if folder.is_symlink() or not folder.is_dir():
        return ["its files are missing"]
    if not row.encrypted:
        problems = folder_problems(folder)
    else:  # only the owner of the key could say more; age itself notices every changed byte
        names = [f"{name}{SUFFIX}" for name in EXPORTED_FILES]
        problems = [f"{name} is missing" for name in names if not (folder / name).is_file()]
    size = sum(path.lstat().st_size for path in folder.iterdir())
    if not problems and size != row.size_bytes:
        problems = [f"its files have {size} bytes instead of {row.size_bytes}"]
    return problems


def _files(
    data_dir: Path,
    place: str,
    refs: Mapping[str, BodyRef],
    again: Callable[[Reader], Mapping[str, BodyRef]],
    lost: str,
    tell: Tell,
    opened: Opened,
) -> Check:
    """Files that are named one by one, with their checksums; `again` reads the rows once more, `lost` says what is."""
    found = {}
    for ref in _paced(refs.values(), tell, place):
        problem = _file_problem(data_dir / place / ref.name, ref)
        if problem is not None:
            found[ref.name] = f"{ref.name}: {problem}"
    if found:
        with opened() as connection:
            still = again(connection)
        found = {name: text for name, text in found.items() if name in still}
    if found:
        return Check(place, "fail", f"{len(found)} of {len(refs)} cannot be read: {lost}", tuple(found.values()))
    size = megabytes(sum(ref.size for ref in refs.values()))
    return Check(place, "ok", f"{len(refs)} in files, {size}, every file has its checksum")


def _file_problem(path: Path, ref: BodyRef) -> str | None:
    try:
        if path.is_symlink():
            return "is a link"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or 'input/output error'})"
    return None if digest == ref.sha256 else "does not match its checksum"


def _strays(data_dir: Path, running: bool, opened: Opened) -> Check:
    """Files that no row names: what a crash left, which the next start removes, or what is being written just now."""
    seen = {
        place: {path.name: path for path in (data_dir / place).iterdir()} if (data_dir / place).is_dir() else {}
        for place in ("checkpoints", "bodies", "snapshots")
    }
    with opened() as connection:  # after the files: a row is written after its files
        named = {
            "checkpoints": {row.folder for row in checkpoint_files(connection)},
            "bodies": set(body_files(connection)),
            "snapshots": set(snapshot_files(connection)),
        }
    strays, young = [], 0
    for place, paths in seen.items():
        for name in sorted(paths.keys() - named[place]):
            age = _age(paths[name])
            if age is None:
                continue
            if running and age < YOUNG_SECONDS:
                young += 1
            else:
                strays.append(f"{place}/{name}")
    written = f"; {young} are being written" if young else ""
    if strays:
        detail = f"{len(strays)} files or folders that nothing names, left by a crash; the next start removes them"
        return Check("left over", "warn", f"{detail}{written}", tuple(strays))
    return Check("left over", "ok", f"no file that nothing names{written}")


def _age(path: Path) -> float | None:
    """Seconds since a file or folder was last written; None if it has gone."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return None


def _paced(things: Iterable[T], tell: Tell, name: str) -> Iterable[T]:
    """The same things; tells about once a second how many have been looked at."""
    told = time.monotonic()
    for number, thing in enumerate(things):
        if time.monotonic() - told > 1:
            told = time.monotonic()
            tell(f"checking {name}: {number} so far")
        yield thing
