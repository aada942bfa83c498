"""Several real servers on one PostgreSQL database and one data folder, and a proxy that alternates between them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests.fault.harness import MODEL
from tests.support.server import TINSMITH, environment, free_port, wait_until_ready

LEASE = 3.0


class Server:
    """A `tinsmith serve` of its own port on the shared database and folder."""

    def __init__(self, folder: Path, base: Path, database_url: str, number: int, *options: str) -> None:
        self.data_dir = folder / "data"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server{number}.log"
        command = [
            *(str(TINSMITH), "serve", "--port", str(self.port), "--data-dir", str(self.data_dir)),
            *("--base-model", f"{MODEL}={base}", "--threads", "1", "--shutdown-grace", "2", "--edge-lease", str(LEASE)),
            *("--snapshot-operations", "5", "--snapshot-share", "1"),
            *options,
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment({"TINSMITH_DATABASE_URL": database_url}),
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it serves."""
        wait_until_ready(self.url, self.process, self.log, 240)

    @property
    def key(self) -> str:
        """The development key."""
        return (self.data_dir / "dev_key").read_text().strip()

    def kill(self) -> None:
        """It dies; its worker ends when it notices."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it, asleep or awake."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Proxy:
    """Forwards each new TCP connection to the next server that takes it; what was under way with a dead one breaks.

    `only`: the port of the one server that gets new connections for now; None = all in turn.
    """

    def __init__(self, servers: list[Server]) -> None:
        self._ports = [server.port for server in servers]
        self._next = 0
        self.only: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        for _ in self._ports:
            self._next += 1
            port = self.only or self._ports[self._next % len(self._ports)]
            with contextlib.suppress(OSError):
                server = socket.create_connection(("127.0.0.1", port), timeout=2)
                server.settimeout(None)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()
                return
        client.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


class Cluster:
    """The servers, and what their database says. `url` is of the proxy."""

    def __init__(self, servers: list[Server], proxy: Proxy, rows: Any) -> None:
        self.servers = servers
        self.proxy = proxy
        self.url = proxy.url
        self.rows = rows

    @property
    def key(self) -> str:
        """The development key."""
        return self.servers[0].key

    def saved(self, path: str) -> dict[str, bytes]:
        """The files with numbers of a checkpoint, by its tinker path."""
        model_id, _, name = path.removeprefix("tinker://").rsplit("/", 2)
        query = "SELECT folder FROM checkpoints WHERE model_id = :m AND name = :n"
        [(folder,)] = self.rows(query, m=model_id, n=name)
        files = sorted((self.servers[0].data_dir / "checkpoints" / folder).glob("*.safetensors"))
        assert files, "an empty checkpoint proves nothing"
        return {file.name: file.read_bytes() for file in files}

    def outcomes(self, model_id: str) -> list[tuple[Any, ...]]:
        """(seq_id, kind, state) of all operations of a model; an outcome that has expired was done."""
        query = "SELECT seq_id, kind, state FROM operations WHERE scope = :s ORDER BY seq_id"
        return self.rows(query, s=f"model:{model_id}")

    def tokens(self, session_id: str) -> list[tuple[Any, ...]]:
        """What a session used, as it will be billed."""
        query = "SELECT kind, SUM(tokens)::bigint FROM token_usage WHERE session_id = :s GROUP BY kind ORDER BY kind"
        return self.rows(query, s=session_id)

    def holder(self, model_id: str) -> tuple[Any, ...]:
        """(edge, fence) of a run."""
        return self.rows("SELECT edge_id, fence FROM run_leases WHERE model_id = :m", m=model_id)[0]


@contextmanager
def cluster(folder: Path, base: Path, database_url: str, *options: str, count: int = 2) -> Iterator[Cluster]:
    """Servers that are ready, with these options besides; all are stopped at the end."""
    (folder / "data").mkdir(parents=True)
    servers: list[Server] = []
    proxy: Proxy | None = None

    def rows(query: str, **values: object) -> list[tuple[Any, ...]]:
        return _rows(database_url, query, values)

    try:
        servers = [Server(folder, base, database_url, number, *options) for number in range(count)]
        for server in servers:
            server.wait_until_ready()
        proxy = Proxy(servers)
        yield Cluster(servers, proxy, rows)
    finally:
        if proxy is not None:
            proxy.close()
        for server in servers:
            server.stop()


def _rows(database_url: str, query: str, values: dict[str, object]) -> list[tuple[Any, ...]]:
    """Ask in a loop of its own: the tests of this folder are not coroutines."""

    async def ask() -> list[tuple[Any, ...]]:
        engine = create_async_engine(database_url, poolclass=NullPool)
        async with engine.connect() as connection:
            found = [tuple(row) for row in await connection.execute(text(query), values)]
        await engine.dispose()
        return found

    return asyncio.run(ask())
