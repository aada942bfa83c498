"""A real server whose disk is full or read-only, or whose files may not grow: errors are clear, then training goes on.

A disk of a few megabytes (tmpfs in a mount namespace of the server's own), where the kernel lets us make one; and
everywhere the kernel's limit on the size of a file, set and taken away while the server and its worker run.
"""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.conftest import MODEL
from tests.support.api import DATA
from tests.support.server import TINSMITH, RunningServer, environment, serve
from tests.support.tiny_model import make_tiny_model

LARGE = [{"model_input": [5] * 200, "loss_fn_inputs": {"target_tokens": [6] * 200}}] * 50
NOT_WRITTEN = "(save_weights) could not be written"
"""A line of the log: the outcome waits for room."""
STEP = {"learning_rate": 0.01}
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


def _arguments(tiny: Path) -> list[str]:
    return ["--base-model", f"{MODEL}={tiny}", "--threads", "1", "--poll-hold", "1", "--sweep-interval", "0.5"]


class Trainer:
    """A client that knows what it was promised."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.session = self.post("create_session", sdk_version="test").json()["session_id"]
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        self.model = self.outcome(self.post("create_model", **body))["model_id"]

    def post(self, route: str, **body: Any) -> httpx.Response:
        """Send once."""
        return self.client.post(route, json=body)

    def outcome(self, answer: httpx.Response, seconds: float = 60) -> dict[str, Any]:
        """Poll until there is one."""
        assert answer.status_code == 200, answer.text
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            polled = self.post("retrieve_future", request_id=answer.json()["request_id"])
            if polled.status_code == 200:
                return dict(polled.json())
            assert polled.status_code in (408, 503), polled.text
        raise AssertionError("no outcome")

    def wait_for(self, answer: httpx.Response, other: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until there is an outcome, or something else is true."""
        until = time.monotonic() + seconds
        while not other() and self.post("retrieve_future", request_id=answer.json()["request_id"]).status_code != 200:
            assert time.monotonic() < until, "no outcome"

    def do(self, route: str, **body: Any) -> dict[str, Any]:
        """An operation that succeeds."""
        found = self.outcome(self.post(route, model_id=self.model, **body))
        assert "error" not in found, found
        return found

    def step(self) -> None:
        """One step of training."""
        self.do("forward_backward", data=DATA, loss_fn="cross_entropy")
        self.do("optim_step", adam_params=STEP)

    def scores(self) -> list[float]:
        """The logprobs under the present weights."""
        return list(self.do("forward", data=DATA, loss_fn="cross_entropy")["loss_fn_outputs"][0]["logprobs"]["data"])


def _undisturbed(server: RunningServer, steps: int) -> list[float]:
    with server.client() as client:
        trainer = Trainer(client)
        for _ in range(steps):
            trainer.step()
        return trainer.scores()


def _told(answer: dict[str, Any], text: str, server: RunningServer) -> None:
    assert str(server.data_dir) not in text
    assert answer["category"] == "server"


def _while_full(server: RunningServer, trainer: Trainer, full: AbstractContextManager[None], reason: str) -> None:
    """Steps and saves; a large request and a save on a full disk; then there is room again, and all goes on."""
    trainer.step()
    first = trainer.do("save_weights", path="a")["path"]
    trainer.step()
    large = {"model_id": trainer.model, "data": LARGE, "loss_fn": "cross_entropy"}
    failures = server.log.read_text().count(NOT_WRITTEN)
    with full:
        refused = trainer.post("forward", **large)
        if refused.status_code == 503:
            assert refused.headers["retry-after"]
            assert reason in refused.text
            _told(refused.json()["error"], refused.text, server)
        saving = trainer.post("save_weights", model_id=trainer.model, path="a", overwrite=True)
        if saving.status_code == 503:
            _told(saving.json()["error"], saving.text, server)
        else:  # the worker meets the full disk; the outcome may have to wait for room
            trainer.wait_for(saving, lambda: server.log.read_text().count(NOT_WRITTEN) > failures)
    if saving.status_code == 200:
        failed = trainer.outcome(saving)
        assert failed["code"] == "checkpoint_not_written"
        assert reason in failed["error"]
        _told(failed, str(failed), server)
    loaded = trainer.post("load_weights", session_id=trainer.session, model_seq_id=1, path=first, optimizer=True)
    assert "error" not in trainer.outcome(loaded)  # what was saved before is as it was
    trainer.step()
    assert trainer.do("save_weights", path="a", overwrite=True)["path"] == first
    assert "error" not in trainer.outcome(trainer.post("forward", **large))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _tree(int(child))


@contextmanager
def _no_file_grows_beyond(pids: Sequence[int], size: int) -> Iterator[None]:
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[pid][1]))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before[pid])


@pytest.mark.exhaustive
@pytest.mark.parametrize("whole", [True, False], ids=["server", "worker"])
def test_files_that_may_not_grow(tmp_path: Path, tiny: Path, whole: bool) -> None:
    with serve(tmp_path / "data", _arguments(tiny)) as server, server.client() as client:
        trainer = Trainer(client)
        pids = list(_tree(server.process.pid))
        full = _no_file_grows_beyond(pids if whole else pids[1:], 2000)
        _while_full(server, trainer, full, "File too large")
        assert trainer.scores() == _undisturbed(server, 3)


def _fill(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def _can_mount() -> bool:
    try:
        tried = subprocess.run([*NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="this kernel lets nobody mount a small disk here")


@needs_mounts
@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, tiny: Path) -> None:
    """The server's data folder is a disk of 6 MB; a file of another program fills it, and goes away again."""
    data_dir = tmp_path / "data"
    script = f'mount -t tmpfs -o size=6m none "{data_dir}" && exec "$@"'
    command = (*NAMESPACE, script, "sh", TINSMITH, "serve")
    with serve(data_dir, _arguments(tiny), command=command) as server, server.client() as client:
        inside = Path(f"/proc/{server.process.pid}/root") / data_dir.relative_to("/")

        @contextmanager
        def full() -> Iterator[None]:
            _fill(inside / "of_another")
            yield
            (inside / "of_another").unlink()

        trainer = Trainer(client)
        _while_full(server, trainer, full(), "No space left on device")
        assert trainer.scores() == _undisturbed(server, 3)


@pytest.mark.slow
@needs_mounts
def test_a_disk_that_becomes_read_only(tmp_path: Path, tiny: Path) -> None:
    """While the server runs, a read-only mount covers its data folder: no new file can be made, and it goes away again.

    What is open stays so: the kernel makes no disk read-only on which a file is open for writing.
    """
    data_dir = tmp_path / "data"
    script = f'mount -t tmpfs -o size=20m none "{data_dir}" && exec "$@"'
    command = (*NAMESPACE, script, "sh", TINSMITH, "serve")
    with serve(data_dir, _arguments(tiny), command=command) as server, server.client() as client:
        enter = ("nsenter", "--preserve-credentials", "-U", "-m", "-t", str(server.process.pid), "sh", "-c")

        @contextmanager
        def read_only() -> Iterator[None]:
            cover = f'mount --bind "{data_dir}" "{data_dir}" && mount -o remount,bind,ro "{data_dir}"'
            subprocess.run([*enter, cover], check=True, timeout=20)
            refused = subprocess.run([*enter, f'touch "{data_dir}/x"'], capture_output=True, text=True, timeout=20)
            assert "Read-only file system" in refused.stderr
            yield
            subprocess.run([*enter, f'umount "{data_dir}"'], check=True, timeout=20)

        trainer = Trainer(client)
        _while_full(server, trainer, read_only(), "Read-only file system")
        assert trainer.scores() == _undisturbed(server, 3)


@needs_mounts
def test_a_server_does_not_start_on_a_read_only_disk(tmp_path: Path, tiny: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    script = f'mount -t tmpfs -o size=6m none "{data_dir}" && mount -o remount,ro "{data_dir}" && exec "$@"'
    command = [*NAMESPACE, script, "sh", str(TINSMITH), "serve", "--port", "0", "--data-dir", str(data_dir)]
    done = subprocess.run([*command, *_arguments(tiny)], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 1
    assert "the data folder cannot be used (Read-only file system)" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
