"""Who uses a data folder: a lock that the operating system takes back when the process ends, however it ends.

With SQLite one server has the folder to itself; servers that share a PostgreSQL database share the folder. Not
responsible for files outside the lock's own.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from schemas.errors import Unavailable


class FolderLock:
    """Holds `data_dir/lock` from construction until `release`. The file stays; only the lock on it counts.

    Args:
        shared: beside others who share it; they keep out whoever wants the folder alone.

    Raises:
        Unavailable: another process, or another store in this one, holds it.
    """

    def __init__(self, data_dir: Path, *, shared: bool = False) -> None:
        self._descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise Unavailable(
                f"another server (process {holder or 'unknown'}) is using this data folder",
                hint="stop that server, or give this one a data folder of its own",
                code="data_folder_in_use",
            ) from None
        if shared:
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the folder free."""
        os.close(self._descriptor)
