"""Small file operations that are safe against crashes and other users. They block: event loops call them in threads.

Not responsible for what the files mean.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Create a folder of our own with mode 0700 (its missing parents with the usual mode); an existing one stays.

    Raises:
        OSError: it cannot be created, or is something other than a folder (a link to one included).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise
    else:
        fsync_folder(folder.parent)


def is_older(path: Path, seconds: float) -> bool:
    """Whether a file or folder was last written at least so long ago; one that has gone was not."""
    try:
        return path.lstat().st_mtime <= time.time() - seconds
    except FileNotFoundError:
        return False


def claim_folder(folder: Path, mark: str) -> None:
    """Make a folder ours: create it, or close an existing one to others (mode 0700).

    An existing folder is closed only if it is empty or holds `mark`, the name of a file of ours: one that serves
    another purpose too (a home, /tmp) must stay open to its users. Our files in it are private in any case.

    Raises:
        OSError: it cannot be created, read or changed, or is not a folder.
    """
    folder = folder.resolve()
    make_private_folder(folder)
    names = {path.name for path in folder.iterdir()}
    status = folder.stat()
    ours = status.st_uid == os.getuid() and (not names or mark in names)
    if ours and stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, mode 0600, and make its content (not yet its name) durable.

    Raises:
        OSError: it exists, or cannot be written; nothing is left behind then.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def replace_private(path: Path, data: bytes) -> None:
    """Write a whole file, mode 0600, so that a crash leaves either the old content or the new, never between."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_new(temporary, data)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def read_private(path: Path) -> bytes | None:
    """The content of a regular file of ours, which is made mode 0600 if it is not; None if there is no such file.

    Raises:
        OSError: it cannot be read, or is a link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(file.fileno(), 0o600)
        return file.read()
