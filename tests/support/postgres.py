"""A real PostgreSQL for tests: Debian's binaries, a database cluster in a temporary folder, a unix socket, no network.

It runs as a user without rights when the tests run as root, as PostgreSQL insists.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncpg

ROOTS = ("/usr/lib/postgresql", "/usr/pgsql", "/opt/postgresql")
USERS = ("postgres", "nobody")
OWNER = "tinsmith"


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`, the newest version; None if there is none."""
    folders = [path.parent for root in ROOTS if Path(root).is_dir() for path in Path(root).glob("*/bin/initdb")]
    if folders:
        return max(folders, key=lambda path: float(path.parent.name))
    found = shutil.which("initdb")
    return None if found is None else Path(found).resolve().parent


class Postgres:
    """A server that can be killed and started again.

    `durable`: with fsync; without it a power failure would lose what a killed process does not.
    """

    def __init__(self, *, durable: bool = False) -> None:
        bin_folder = binaries()
        assert bin_folder is not None
        self._bin = bin_folder
        self._durable = durable
        self._folder = Path(tempfile.mkdtemp(prefix="tinsmith-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            names = {entry.pw_name for entry in pwd.getpwall()}
            entry = pwd.getpwnam(next(user for user in USERS if user in names))
            os.chown(self._folder, entry.pw_uid, entry.pw_gid)
            self._as = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def create(self) -> None:
        """Make the cluster, with a locale whose order of texts is not that of their bytes, and start it."""
        locale = ["--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US", "--encoding=UTF8"]
        command = [self._bin / "initdb", "-D", self._folder / "data", "-U", OWNER, "-A", "trust", "--no-sync", *locale]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", **self._as)
        assert done.returncode == 0, done.stderr
        self.start()

    def start(self) -> None:
        """Start, and wait until it answers."""
        sync = "on" if self._durable else "off"
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._folder),
            "fsync": sync,
            "full_page_writes": sync,
            "max_connections": "60",
            "shared_buffers": "32MB",
        }
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        (self._folder / "data" / "postmaster.pid").unlink(missing_ok=True)  # of one that was killed
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._folder / "data", *flags],
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **self._as,
            )
        deadline = time.monotonic() + 60
        ready = [self._bin / "pg_isready", "-h", str(self._folder), "-U", OWNER, "-d", "postgres", "-q"]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.05)

    def create_database(self, name: str) -> None:
        """An empty database."""
        subprocess.run([self._bin / "createdb", "-h", self._folder, "-U", OWNER, name], check=True, timeout=60)

    def kill(self) -> None:
        """End every process of it, as a crash would."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Let go of everything."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def url(self, database: str, *, user: str = OWNER, password: str = "") -> str:
        """As `database_url` takes it."""
        secret = f":{password}" if password else ""
        return f"postgresql+asyncpg://{user}{secret}@/{database}?host={self._folder}"

    @property
    def log(self) -> str:
        """What the server has said."""
        return (self._folder / "log").read_text(errors="replace")

    async def connect(self, database: str = "postgres") -> Any:
        """A connection of the test's own."""
        return await asyncpg.connect(host=str(self._folder), user=OWNER, database=database)

    async def execute(self, statement: str, database: str = "postgres") -> None:
        """Run a statement outside of a transaction."""
        connection = await self.connect(database)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    async def rows(self, query: str, *values: object, database: str) -> list[tuple[Any, ...]]:
        """What the database says."""
        connection = await self.connect(database)
        try:
            return [tuple(row) for row in await connection.fetch(query, *values)]
        finally:
            await connection.close()
