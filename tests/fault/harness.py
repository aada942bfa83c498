"""A real server that is killed and comes back, and clients that only want to train.

Processes are killed with SIGKILL; whoever is gone is started again as a service manager would. Clients are the
unmodified SDK, or plain HTTP where the SDK has no call.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tinker
import torch
from tinker import types

from schemas.fail_points import POINTS, VARIABLE
from tests.fault.front import Front
from tests.support.server import TINSMITH, environment, free_port, wait_until_ready

MODEL = "acme/tiny"
CLIENT_SECONDS = 400.0
"""What a client gets for anything: a dozen restarts may lie in it, on a machine that does other things too."""
STATE = "CASE state WHEN 'expired' THEN 'done' ELSE state END"
"""Of an operation: whether its client's last acknowledgement arrived before a death is nobody's promise."""
RAW_DATA = [{"model_input": [5, 6, 7, 8], "loss_fn_inputs": {"target_tokens": [6, 7, 8, 9]}}]


@dataclass(frozen=True)
class Start:
    """How a start went, in monotonic seconds: the process is there, connections are taken, requests are answered, the
    base model is loaded."""

    spawned: float
    listening: float
    answering: float
    ready: float


class Service:
    """A server on one port and one data folder, however often it dies.

    Args:
        options: of `tinsmith serve`.
        fail_at: the value of `TINSMITH_FAIL_AT`.
    """

    def __init__(self, folder: Path, base: Path, *options: str, fail_at: str = "") -> None:
        self.data_dir = folder / "data"
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        port = free_port()
        self._inside = f"http://127.0.0.1:{port}"
        self._front = Front(port)
        self.url = f"http://127.0.0.1:{self._front.port}"
        """For clients: connections to it wait while the server is away."""
        self.direct = self._inside
        """The server's own address: connections to it are refused while it is away."""
        self.starts = 0
        self.spawned = 0.0
        """When the server was started last (monotonic)."""
        self._lives: set[int] = set()
        """The process ids of all servers so far, each the first of a session of its own."""
        self._environment = environment({VARIABLE: fail_at} if fail_at else {})
        self._command = [
            *(str(TINSMITH), "serve", "--port", str(port), "--data-dir", str(self.data_dir)),
            *("--base-model", f"{MODEL}={base}", "--threads", "1", "--shutdown-grace", "2", "--restart-limit", "50"),
            *("--death-limit", "50"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._keeper = threading.Thread(target=self._keep, name="service manager", daemon=True)

    def start(self) -> None:
        """Start, wait until it serves, and from then on start it again whenever it is gone."""
        self._process = self._spawn()
        try:
            wait_until_ready(self._inside, self._process, self.log, CLIENT_SECONDS)
        except BaseException:
            self.stop()
            raise
        self._keeper.start()

    def stop(self) -> None:
        """End it for good."""
        self._over.set()
        self._front.close()
        if self._keeper.is_alive():
            self._keeper.join()
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + 30
        while left := _ranks_of(self._lives):
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"{len(left)} workers outlive their servers:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def kill_for_good(self) -> None:
        """It dies, and nobody starts it again."""
        self._over.set()
        self._keeper.join()
        self.kill_server()

    def take_down(self) -> None:
        """Server and worker die, and nobody starts them until `bring_up`."""
        self._wanted.clear()
        self.kill_tree()

    def bring_up(self) -> Start:
        """Start it again, and wait until it serves."""
        before = self.starts
        self._wanted.set()
        while self.starts == before:
            time.sleep(0.02)
        listening = self._wait_until_listening()
        answering = self._wait_until_answering()
        self.wait_until_ready()
        return Start(self.spawned, listening, answering, time.monotonic())

    def _wait_until_listening(self) -> float:
        deadline = time.monotonic() + CLIENT_SECONDS
        port = int(self._inside.rpartition(":")[2])
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return time.monotonic()
            time.sleep(0.02)
        raise AssertionError("nothing listens")

    def _wait_until_answering(self) -> float:
        """One request, which waits while the server opens its data folder."""
        httpx.get(f"{self._inside}/api/v1/healthz", timeout=CLIENT_SECONDS)
        return time.monotonic()

    @property
    def key(self) -> str:
        """The development key."""
        return (self.data_dir / "dev_key").read_text().strip()

    def kill_server(self) -> bool:
        """The server dies, if it is alive; its worker ends when it notices."""
        assert self._process is not None
        alive = self._process.poll() is None
        self._process.send_signal(signal.SIGKILL)
        return alive

    def kill_tree(self) -> bool:
        """Server and worker die at the same moment, as when a container takes more memory than it may."""
        assert self._process is not None
        alive = self._process.poll() is None
        self.signal_tree(signal.SIGKILL)
        return alive

    def signal_tree(self, number: signal.Signals) -> None:
        """Send a signal to the server and all that it started; the server first, so that it cannot react."""
        assert self._process is not None
        for pid in self.tree():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def tree(self) -> list[int]:
        """The process ids of the server and of all in its session: workers are in process groups of their own."""
        assert self._process is not None
        return [self._process.pid, *(pid for pid in _in_sessions({self._process.pid}) if pid != self._process.pid)]

    def kill_worker(self) -> bool:
        """The worker dies, if there is one."""
        assert self._process is not None
        try:
            text = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            children = text.split() or self._children_of_threads()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return bool(children)

    def wait_for_start(self) -> None:
        """Wait until the next server is there, after one was killed."""
        before = self.starts
        deadline = time.monotonic() + CLIENT_SECONDS
        while self.starts == before and time.monotonic() < deadline:
            time.sleep(0.05)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the base model is loaded."""
        deadline = time.monotonic() + CLIENT_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self._inside}/api/v1/readyz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
            time.sleep(0.1)
        raise AssertionError(f"not ready again:\n{self.log.read_text()[-4000:]}")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What the database says."""
        return rows(self.data_dir, query, *values)

    def saved(self, path: str) -> dict[str, bytes]:
        """The files with numbers of a checkpoint, by its tinker path."""
        return saved(self.data_dir, path)

    def outcomes(self, model_id: str) -> list[tuple[int, str, str]]:
        """(seq_id, kind, state) of all operations of a model; what has expired counts as done."""
        query = f"SELECT seq_id, kind, {STATE} FROM operations WHERE scope = ? ORDER BY seq_id"
        return [(seq, kind, state) for seq, kind, state in self.rows(query, f"model:{model_id}")]

    def tokens(self, session_id: str) -> list[tuple[str, int]]:
        """What a session used, as it will be billed."""
        query = "SELECT kind, SUM(tokens) FROM token_usage WHERE session_id = ? GROUP BY kind ORDER BY kind"
        return [(kind, count) for kind, count in self.rows(query, session_id)]

    def _children_of_threads(self) -> list[str]:
        """The worker is started by a thread, whose child it is."""
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return [child for task in tasks for child in (task / "children").read_text().split()]

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self.spawned = time.monotonic()
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        self._lives.add(process.pid)
        return process

    def _keep(self) -> None:
        while not self._over.wait(0.1):
            assert self._process is not None
            if self._process.poll() is not None and self._wanted.is_set():
                self._process = self._spawn()


def _in_sessions(sessions: set[int]) -> list[int]:
    """The processes that belong to one of these sessions."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(ProcessLookupError):
            if os.getsid(pid) in sessions:
                found.append(pid)
    return found


def _ranks_of(servers: set[int]) -> list[int]:
    """The ranks' processes that servers have started and that have not ended."""
    found = []
    for pid in _in_sessions(servers):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"workers.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def rows(data_dir: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """What the database of a data folder says."""
    database = sqlite3.connect(f"file:{data_dir / 'tinsmith.db'}?mode=ro", uri=True, timeout=30)
    try:
        return database.execute(query, values).fetchall()
    finally:
        database.close()


def saved(data_dir: Path, path: str) -> dict[str, bytes]:
    """The files with numbers of a checkpoint, by its tinker path."""
    model_id, _, name = path.removeprefix("tinker://").rsplit("/", 2)
    [(folder,)] = rows(data_dir, "SELECT folder FROM checkpoints WHERE model_id = ? AND name = ?", model_id, name)
    files = sorted((data_dir / "checkpoints" / folder).glob("*.safetensors"))
    assert files, "an empty checkpoint proves nothing"
    return {file.name: file.read_bytes() for file in files}


@contextmanager
def serving(folder: Path, base: Path, *options: str, fail_at: str = "") -> Iterator[Service]:
    """A service that is stopped at the end."""
    service = Service(folder, base, *options, fail_at=fail_at)
    try:
        service.start()
        yield service
    finally:
        service.stop()


@dataclass(frozen=True)
class Kill:
    """At a place (or there with operations of one kind, `place:kind`), when it is reached for the `hit`-th time in one
    life of a process: who dies (`schemas.fail_points.VICTIMS`)."""

    at: str
    victim: str
    hit: int = 1

    @property
    def name(self) -> str:
        """Of the marker."""
        return f"{self.at} {self.victim}"


def fail_at(markers: Path, kills: Iterable[Kill]) -> str:
    """The value of the variable. Who has died leaves a file in `markers`."""
    markers.mkdir(parents=True, exist_ok=True)
    return ";".join(_armed(kill, markers / kill.name) for kill in kills)


def _armed(kill: Kill, marker: Path) -> str:
    place, colon, kind = kill.at.partition(":")
    return f"{POINTS.index(place)}{colon}{kind},{kill.hit},{marker},{kill.victim}"


# -- what clients do --------------------------------------------------------------------------------------------------
def example(seed: int, length: int = 24) -> types.Datum:
    """Random tokens, each of which predicts the next."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 259, (length + 1,), generator=generator)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(tokens[1:]),
            "weights": types.TensorData.from_torch(torch.ones(length)),
        },
    )


def sdk(service: Service) -> Any:
    """The SDK's client."""
    return tinker.ServiceClient(base_url=service.url, api_key=service.key)


def train(client: Any, steps: int, *, at_step: Callable[[int], None] = lambda step: None, ahead: int = 2) -> None:
    """`steps` times forward_backward and optim_step, `ahead` of them on their way before the first is waited for."""
    waiting: list[tuple[Any, Any]] = []
    for step in range(steps):
        data = [example(100 * step + index) for index in range(3)]
        loss = client.forward_backward(data, "cross_entropy")
        waiting.append((loss, client.optim_step(types.AdamParams(learning_rate=1e-2 / (1 + step)))))
        at_step(step)
        while len(waiting) > ahead:
            loss, applied = waiting.pop(0)
            loss.result(timeout=CLIENT_SECONDS)
            applied.result(timeout=CLIENT_SECONDS)
    for loss, applied in waiting:
        loss.result(timeout=CLIENT_SECONDS)
        applied.result(timeout=CLIENT_SECONDS)


class Raw:
    """Plain HTTP that repeats a request until it is answered: a request has its seq_id, so that is safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._http = httpx.Client(base_url=f"{service.url}/api/v1", headers={"X-API-Key": service.key}, timeout=60)

    def call(self, method: str, route: str, **body: Any) -> dict[str, Any]:
        """The JSON of a 200."""
        answer = self._answer(method, route, **body)
        assert answer.status_code in (200, 204), answer.text
        return dict(answer.json()) if answer.content else {}

    def delete(self, route: str) -> None:
        """Delete what may be deleted already: the answer to the first try may have been lost."""
        answer = self._answer("DELETE", route)
        assert answer.status_code in (200, 204, 404), answer.text

    def refused(self, route: str, **body: Any) -> str:
        """The code of a refusal."""
        answer = self._answer("POST", route, **body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["code"])

    def do(self, route: str, **body: Any) -> dict[str, Any]:
        """The result of an operation."""
        outcome = self._outcome(route, **body)
        assert "error" not in outcome, outcome
        return outcome

    def fails(self, route: str, **body: Any) -> str:
        """The code with which an operation fails."""
        return str(self._outcome(route, **body)["code"])

    def _outcome(self, route: str, **body: Any) -> dict[str, Any]:
        request_id = self.call("POST", route, **body)["request_id"]
        return self.call("POST", "retrieve_future", request_id=request_id)

    def _answer(self, method: str, route: str, **body: Any) -> httpx.Response:
        """What is neither a lost connection nor "not now"."""
        deadline = time.monotonic() + CLIENT_SECONDS
        while time.monotonic() < deadline:
            try:
                answer = self._http.request(method, route, json=body or None)
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            if answer.status_code not in (408, 503):
                return answer
            time.sleep(0.1)
        raise AssertionError(f"{route} had no answer")
