"""What `test_moments.py` needs: clients with a program that anybody can go on with, copies of a data folder as of one
moment, and a look at what a server makes of a copy.

A copy holds everything that was written at that moment, as a disk does after a power failure that lost nothing that it
had said to have; files that may still change are really copied, the others are links.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.doctor import check_data_folder
from app.settings import Settings
from store.database import Store
from tests.app.conftest import MODEL
from tests.fault.harness import Raw, Service
from tests.support.api import Api, datum
from tests.support.api import serving as in_process
from tests.support.processes import freeze

SETTLED_SECONDS = 5.0
"""A file that was not written for so long is not being written."""
NEVER_COPIED = ("lock", "tinsmith.db-shm")
"""What the kernel forgets when a machine stops."""
SNAPSHOTS = ("--snapshot-operations", "6", "--snapshot-share", "1")


# -- what clients do --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Request:
    """An operation of a program, without its model: `body` may name a checkpoint of the model as `path_of`."""

    route: str
    body: dict[str, Any]
    path_of: str | None = None

    def fields(self, model_id: str, seq_id: int) -> dict[str, Any]:
        """The JSON of the request."""
        path = {} if self.path_of is None else {"path": f"tinker://{model_id}/weights/{self.path_of}"}
        return {"model_id": model_id, "seq_id": seq_id, **self.body, **path}


def batch(seed: int, round_: int) -> Request:
    """Random enough; every sixth is large, so that it is a file and not in a row."""
    count, length = (40, 100) if round_ % 6 == 5 else (2, 12)
    rows = [[3 + (seed * 7 + round_ * 11 + row * 5 + place) % 250 for place in range(length)] for row in range(count)]
    return Request("forward_backward", {"data": [datum(*row) for row in rows], "loss_fn": "cross_entropy"})


def rounds(seed: int) -> Iterator[tuple[list[list[Request]], list[str]]]:
    """Without end: groups of requests that are sent together, and the checkpoints that are deleted after them."""
    round_ = 0
    while True:
        step = Request("optim_step", {"adam_params": {"learning_rate": 0.01 / (1 + round_ % 5)}})
        groups = [[batch(seed, round_), step]]
        if round_ % 5 == 4:
            groups = [[batch(seed, round_ + 1), Request("zero_grad", {})], *groups]
        if round_ % 4 == 3:
            groups.append([Request("save_weights", {"path": f"r{round_}"})])
        if round_ % 8 == 7:
            groups.append([Request("load_weights", {"optimizer": True}, path_of=f"r{round_ - 4}")])
        yield groups, [f"r{old}" for old in (round_ - 8, round_ - 12) if round_ % 8 == 7 and old > 0]
        round_ += 1


def requests(seed: int) -> Iterator[Request]:
    """The same, one after the other: number n has seq_id n, from 1."""
    for groups, _ in rounds(seed):
        for group in groups:
            yield from group


class Client(threading.Thread):
    """Trains, saves, loads and deletes until it is told to stop."""

    def __init__(self, service: Service, seed: int) -> None:
        super().__init__(name=f"client {seed}", daemon=True)
        self._service = service
        self.seed = seed
        self.over = threading.Event()
        self.problem: BaseException | None = None
        self.model_id = ""
        self._new()

    def _new(self) -> None:
        self._raw = Raw(self._service)
        session = self._raw.call("POST", "create_session", sdk_version="test")["session_id"]
        lora = {"rank": 4, "seed": self.seed}
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        self.model_id = str(self._raw.do("create_model", **body)["model_id"])

    def run(self) -> None:
        try:
            seq_id = 1
            with ThreadPoolExecutor(2) as threads:
                for groups, deleted in rounds(self.seed):
                    for group in groups:
                        sent = [
                            threads.submit(self._raw.do, request.route, **request.fields(self.model_id, seq_id + place))
                            for place, request in enumerate(group)
                        ]
                        seq_id += len(group)
                        for outcome in sent:
                            outcome.result()
                    for name in deleted:
                        self._raw.delete(f"training_runs/{self.model_id}/checkpoints/weights/{name}")
                    if self.over.is_set():
                        return
        except BaseException as error:
            self.problem = error
            raise

    def stop(self) -> None:
        """End after the present round."""
        self.over.set()
        self.join(timeout=120)
        if self.problem is not None:
            raise AssertionError("a client failed") from self.problem


# -- copies -----------------------------------------------------------------------------------------------------------
@contextmanager
def frozen(service: Service) -> Iterator[None]:
    """All processes of a service stand still."""
    try:
        freeze(*service.tree())
        yield
    finally:
        service.signal_tree(signal.SIGCONT)


def copy_moment(data_dir: Path, to: Path) -> None:
    """Copy a folder in which nobody writes now."""
    now = time.time()
    for folder, folders, names in os.walk(data_dir):
        folders[:] = [name for name in folders if name != "base_models" and not name.startswith("idle_")]
        target = to / Path(folder).relative_to(data_dir)
        target.mkdir(mode=0o700)
        for name in names:
            if name in NEVER_COPIED:
                continue
            source = Path(folder, name)
            unchanging = Path(folder) != data_dir and not name.startswith(".")
            if unchanging and now - source.stat().st_mtime > SETTLED_SECONDS:
                os.link(source, target / name)
            else:
                shutil.copy2(source, target / name)


def problems(data_dir: Path) -> list[str]:
    """What `tinsmith doctor` finds damaged in a copy, as it is and once the store has opened it."""
    return [
        f"{check.name}: {check.detail} {check.items}" for check in check_data_folder(data_dir) if check.status == "fail"
    ]


async def opens(data_dir: Path) -> None:
    """The store opens a copy, as a server would."""
    await (await Store.open(data_dir)).close()


# -- what a server makes of a copy ------------------------------------------------------------------------------------
def settings_for(data_dir: Path, base: Path) -> Settings:
    """A server on a copy, in this process."""
    return Settings(data_dir=data_dir, base_model=[f"{MODEL}={base}"], poll_hold=5.0)


def _rows(data_dir: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{data_dir / 'tinsmith.db'}?mode=ro", uri=True, timeout=30)) as database:
        return database.execute(query, values).fetchall()


def digest(data_dir: Path, model_id: str, name: str) -> str:
    """Of all numbers in a checkpoint."""
    query = "SELECT folder FROM checkpoints WHERE model_id = ? AND name = ?"
    [(folder,)] = _rows(data_dir, query, model_id, name)
    files = sorted((data_dir / "checkpoints" / folder).glob("*.safetensors"))
    assert files, "an empty checkpoint proves nothing"
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


async def finish(data_dir: Path, base: Path, programs: dict[str, int]) -> dict[int, tuple[int, str]]:
    """Let a server finish what a copy's log has accepted; what a client would send again because an answer was lost is
    sent.

    Args:
        programs: model id -> seed.

    Returns:
        Of each model: seed -> how many operations it has had, and the digest of its state.
    """
    found: dict[int, tuple[int, str]] = {}
    async with in_process(settings_for(data_dir, base)) as api:
        for model_id, seed in programs.items():
            query = "SELECT seq_id, request_id FROM operations WHERE scope = ?"
            accepted = dict(_rows(data_dir, query, f"model:{model_id}"))
            last = max(accepted, default=0)
            for seq_id, request in zip(range(1, last + 1), requests(seed), strict=False):
                request_id = accepted.get(seq_id)
                if request_id is None:
                    request_id = await api.submit(request.route, **request.fields(model_id, seq_id))
                outcome = await api.result(request_id, 120)
                assert "error" not in outcome, (seq_id, request.route, outcome)
            await api.do("save_weights", model_id=model_id, seq_id=last + 1, path="of_the_copy")
            found[seed] = last, digest(data_dir, model_id, "of_the_copy")
        pending = _rows(data_dir, "SELECT scope, seq_id FROM operations WHERE state = 'pending'")
        assert pending == []
    return found


async def undisturbed(api: Api, data_dir: Path, seed: int, wanted: set[int]) -> dict[int, str]:
    """How many operations -> the digest of the state after them, in a run without any disturbance."""
    model_id = await api.model(seed=seed)
    states: dict[int, str] = {}
    for count, request in enumerate(requests(seed)):
        if count in wanted:
            await api.do("save_weights", model_id=model_id, path=f"after{count}")
            states[count] = digest(data_dir, model_id, f"after{count}")
        if count >= max(wanted, default=0):
            return states
        fields = request.fields(model_id, 0)
        del fields["seq_id"]
        await api.do(request.route, **fields)
    raise AssertionError("a program has no end")
