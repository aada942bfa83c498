"""A consistent copy of a data folder, made while its server runs or while none does.

The database is copied at one moment (SQLite's online backup inside one read transaction); the files that it names are
hard-linked where the file system can, else copied. Files never change once they are named, so a link is as good as a
copy against everything but a failing disk. Blocking. Not responsible for the command line (`app/cli.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from schemas.errors import AlreadyExists, InvalidRequest, Unavailable
from store.added_models import FILE as ADDED_MODELS
from store.artifact_place import PLACE_FILE, recorded_place
from store.connections import database_path
from store.files import fsync_file, fsync_folder, read_private
from store.read_only import (
    body_files,
    checkpoint_files,
    open_database,
    require_known_schema,
    snapshot_files,
    unreadable,
)

SECRETS = ("pepper", "dev_key", "url_secret", "token_secret")
"""Keys of the server, without which API keys and addresses in the database mean nothing."""
PLACES = ("snapshots", "checkpoints", "bodies")
"""Folders of files that rows name."""
ATTEMPTS = 20
"""How often the database is copied again because the server dropped something that the last copy names."""
_PAGES = 4096
"""Of the database between two words of progress: 16 MiB."""

Tell = Callable[[str], None]


@dataclass(slots=True)
class Backup:
    """What was copied. `bytes` counts the files; those that were linked take no room of their own."""

    database_bytes: int = 0
    checkpoints: int = 0
    bodies: int = 0
    snapshots: int = 0
    bytes: int = 0
    linked: int = 0
    seconds: float = 0.0
    elsewhere: str | None = None
    """The object storage that has the checkpoints; their files are not part of the copy then."""
    missing: list[str] = field(default_factory=list)
    """What the database names and the data folder itself lacks, or has in another size."""


def back_up(data_dir: Path, destination: Path, *, links: bool = True, tell: Tell = lambda line: None) -> Backup:
    """Copy a data folder to a place that does not exist yet, or is an empty folder; whole or not at all.

    What is made again by itself is left out: converted base models, caches, the lock.

    Args:
        links: whether files may be hard links.
        tell: called with a line of progress.

    Raises:
        AlreadyExists: there is something at the destination.
        InvalidRequest: the destination is inside the data folder.
        Unavailable: there is no data folder, it is of a newer version, or the disk does not take the copy.
    """
    data_dir, destination = data_dir.resolve(), destination.absolute()
    _check_destination(data_dir, destination)
    began = time.monotonic()
    temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}.tmp")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
        done = _Copy(data_dir, temporary, links, tell).run()
        fsync_folder(temporary)
        temporary.rename(destination)
        fsync_folder(destination.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or "input/output error"
            raise Unavailable(f"the backup could not be written ({reason}); nothing was left behind") from error
        if isinstance(error, sqlite3.Error):
            raise unreadable(error) from error
        raise
    done.seconds = time.monotonic() - began
    return done


def _check_destination(data_dir: Path, destination: Path) -> None:
    if destination.resolve().is_relative_to(data_dir):
        raise InvalidRequest(
            "the destination is inside the data folder itself", field="dest", hint="give a folder elsewhere"
        )
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise AlreadyExists("the destination is there already and is no folder", field="dest")
    if destination.is_dir() and any(destination.iterdir()):
        raise AlreadyExists(
            "the destination is there already and is not empty", field="dest", hint="give a new or an empty folder"
        )


@dataclass
class _Copy:
    """One backup on its way: `into` is the unfinished folder."""

    data_dir: Path
    into: Path
    links: bool
    tell: Tell
    report: Backup = field(default_factory=Backup)
    places: tuple[str, ...] = PLACES

    def run(self) -> Backup:
        """Copy until a copy of the database and the files that it names are there together.

        What a running server removes meanwhile is mostly kept by the links that were made before; should a file come
        and go unseen, the database is copied again, and names it no more. So it is if base models come or go meanwhile:
        runs in the copy of the database need those that were served at its moment.
        """
        for name in SECRETS:
            if (self.data_dir / name).is_file():
                self._put(name, link=False)
        self.report.elsewhere = recorded_place(self.data_dir)
        if self.report.elsewhere is not None:
            self.places = tuple(place for place in PLACES if place != "checkpoints")
            self._put(PLACE_FILE, link=False)
        before: set[str] = set()
        for _ in range(ATTEMPTS):
            for place in self.places:
                self._bring(f"{place}/{name}" for name in _names(self.data_dir / place))
            models = self._bring_added_models()
            self._copy_database()
            missing = self._complete()
            if self._bring_added_models() != models:
                self.tell("base models came or went meanwhile; copying the database again")
                continue
            if not missing or missing == before:  # the same twice: the data folder itself lacks them
                break
            before = missing
            self.tell(f"the server removed {len(missing)} files meanwhile; copying the database again")
        else:
            raise Unavailable(
                f"the data folder changed faster than it could be copied, {ATTEMPTS} times",
                hint="try again when less is going on, or stop the server",
            )
        self.report.missing = sorted(missing)
        self._sync()
        return self.report

    # -- the database --------------------------------------------------------------------------------------------
    def _copy_database(self) -> None:
        target = database_path(self.into, None)
        target.unlink(missing_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with open_database(self.data_dir) as source, closing(sqlite3.connect(target)) as copy:
            require_known_schema(source)
            source.backup(copy, pages=_PAGES, progress=self._tell_pages)
            if copy.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                raise Unavailable("the database is damaged", hint="see `tinsmith doctor`", code="database_unavailable")
        self.report.database_bytes = target.stat().st_size

    def _tell_pages(self, _: int, remaining: int, total: int) -> None:
        self.tell(f"database: {total - remaining} of {total} pages")

    def _complete(self) -> set[str]:
        """Bring in what the copied database names and is not here yet, and drop what it does not name.

        Returns what cannot be had, or not whole.
        """
        with closing(sqlite3.connect(database_path(self.into, None))) as copy:
            sizes = {f"checkpoints/{row.folder}": row.size_bytes for row in checkpoint_files(copy)}
            self.report.checkpoints = len(sizes)
            files = {f"bodies/{name}": ref.size for name, ref in body_files(copy).items()}
            self.report.bodies = len(files)
            files |= {f"snapshots/{name}": ref.size for name, ref in snapshot_files(copy).items()}
            self.report.snapshots = len(files) - self.report.bodies
        if self.report.elsewhere is not None:
            sizes = {}
        for folder in sizes:
            self._bring(f"{folder}/{name}" for name in _names(self.data_dir / folder))
        self._bring(files)
        sizes |= files
        for place in self.places:
            for path in (self.into / place).iterdir() if (self.into / place).is_dir() else ():
                if f"{place}/{path.name}" not in sizes:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {name for name, size in sizes.items() if _size(self.into / name) != size}

    def _bring_added_models(self) -> bytes | None:
        """Which base models were added, as of now; None if that was never told."""
        target = self.into / ADDED_MODELS
        target.unlink(missing_ok=True)
        self._put(ADDED_MODELS, link=False)
        return read_private(target)

    # -- files ---------------------------------------------------------------------------------------------------
    def _bring(self, names: Iterable[str]) -> None:
        told = time.monotonic()
        wanted = [name for name in names if not (self.into / name).exists()]
        for number, name in enumerate(wanted, start=1):
            self._put(name, link=self.links)
            if time.monotonic() - told > 1:
                told = time.monotonic()
                self.tell(f"{name.partition('/')[0]}: {number} of {len(wanted)} files")

    def _put(self, name: str, *, link: bool) -> None:
        """Link or copy one regular file; one that has gone meanwhile is passed over."""
        source, target = self.data_dir / name, self.into / name
        if source.is_symlink():
            return
        for parent in reversed(target.relative_to(self.into).parents[:-1]):
            (self.into / parent).mkdir(mode=0o700, exist_ok=True)
        try:
            if link and self._linked(source, target):
                self.report.linked += 1
            else:
                descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                with source.open("rb") as reading, os.fdopen(descriptor, "wb") as writing:
                    shutil.copyfileobj(reading, writing, 1 << 20)
                fsync_file(target)
        except FileNotFoundError:
            target.unlink(missing_ok=True)

    def _linked(self, source: Path, target: Path) -> bool:
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without links
            self.links = False
            return False
        return True

    def _sync(self) -> None:
        """Make everything durable, and count it."""
        fsync_file(database_path(self.into, None))
        for folder, _, names in os.walk(self.into):
            self.report.bytes += sum(Path(folder, name).stat().st_size for name in names)
            fsync_folder(Path(folder))


def _names(root: Path) -> list[str]:
    """The files below a folder, relative to it; none if it is not there. Names that begin with a dot are unfinished."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [str(Path(folder, name).relative_to(root)) for name in files if not name.startswith(".")]
    return sorted(names)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; -1 if there is neither."""
    if path.is_file():
        return path.stat().st_size
    return sum((path / name).stat().st_size for name in _names(path)) if path.is_dir() else -1


def describe(done: Backup) -> str:
    """One line for people."""
    where = "" if done.elsewhere is None else f" (their files stay in {done.elsewhere})"
    return (
        f"{done.checkpoints} checkpoints{where}, {done.bodies} bodies and {done.snapshots} snapshots, "
        f"{done.bytes / 1e6:.1f} MB, {done.linked} files linked, in {done.seconds:.1f} s"
    )
