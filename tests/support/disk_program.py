"""A client's program that makes the server write everything that it can write, and goes on when the disk fails once.

It does what a client does: it sends again what was refused with 503, and saves again what could not be saved.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyrage
import pytest

import store.bodies
import workers.snapshots
from app.doctor import check_data_folder
from app.settings import Settings
from store.snapshots import snapshots_of
from tests.app.conftest import MODEL
from tests.support.api import Api, serving
from tests.support.faulty_disk import FaultyDisk, faulty_disk

LARGE = [{"model_input": [5] * 60, "loss_fn_inputs": {"target_tokens": [6] * 60}}]
"""Request and result are kept in files, if `INLINE_LIMIT` is the one below."""
INLINE_LIMIT = 200
SMALL = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8]}}]
RECIPIENT = str(pyrage.x25519.Identity.generate().to_public())
CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
TOLD = {"unavailable", "database_unavailable", "checkpoint_not_written"}
FOLDER_CHECKS = ("database", "schema", "keys", "checkpoints", "bodies", "snapshots", "left over")


def calm_settings(data_dir: Path, model: Path) -> Settings:
    """Sweeps come only when they are called, so that every run asks the same of the disk."""
    return Settings(
        data_dir=data_dir,
        base_model=[f"{MODEL}={model}"],
        poll_hold=0.3,
        sweep_interval=3600.0,
        shutdown_grace=1.0,
        snapshot_share=1.0,
    )


class Client:
    """A client that goes on: at most one of its requests is refused, or fails."""

    def __init__(self, api: Api, disk: FaultyDisk) -> None:
        self._api = api
        self._disk = disk
        self.refusals: list[str] = []

    def told(self, text: str, code: str, category: str) -> None:
        """A failure: of the server, named, without a path."""
        assert (category, code in TOLD) == ("server", True), text
        assert "/secret" not in text
        assert str(self._api.edge.settings.data_dir) not in text
        self.refusals.append(code)
        assert len(self.refusals) <= 1, self.refusals

    async def request(self, method: str, route: str, **options: Any) -> Any:
        """Send, and again if the server cannot take it now, as the SDK does."""
        while True:
            answer = await self._api.client.request(method, route, **options)
            if answer.status_code != 503:
                assert answer.status_code < 300, answer.text
                return answer
            assert answer.headers["retry-after"]
            error = answer.json()["error"]
            self.told(answer.text, error["code"], error["category"])

    async def do(self, route: str, **body: Any) -> dict[str, Any]:
        """An operation with its outcome; one that could not be done is asked for again with the next number."""
        while True:
            outcome = await self._outcome((await self.request("POST", route, json=body)).json()["request_id"])
            if "error" not in outcome:
                return outcome
            self.told(str(outcome), outcome["code"], outcome["category"])

    async def _outcome(self, request_id: str) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while True:
                answer = await self._api.post("retrieve_future", request_id=request_id)
                if answer.status_code == 200:
                    return dict(answer.json())
                assert answer.status_code == 408, answer.text
                if self._disk.fired is not None:  # before, sweeps would only make more calls, on a slow machine
                    await self._api.edge.app.state.services.housekeeping.sweep()

    async def program(self, number: int) -> list[Any]:
        """Everything that writes, on models of its own; returns what the weights are in the end."""
        opened = await self.request("POST", "create_session", json={"sdk_version": "test"}, headers=_key(number))
        session = opened.json()["session_id"]
        made = {"base_model": MODEL, "lora_config": {"rank": 2, "seed": 1}}
        model = (await self.do("create_model", session_id=session, model_seq_id=0, **made))["model_id"]
        await self._step(model, LARGE)
        first = (await self.do("save_weights", model_id=model, path="a"))["path"]
        await self.do("save_weights_for_sampler", model_id=model, path="s")
        await self._step(model, SMALL)
        path = (await self.do("save_weights", model_id=model, path="a", overwrite=True))["path"]
        assert path == first
        await self.do("save_weights_external", model_id=model, path="e")
        await self.do("save_weights_external", model_id=model, path="sealed", age_encryption_recipients=[RECIPIENT])
        target = {"source_path": path, "session_id": session, "model_seq_id": 3}
        copied = await self.request("POST", "copy_weights", json=target)
        await self.request("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/s")
        assert copied.json()["tinker_path"]
        load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        loaded = (await self.do("load_weights", **load))["model_id"]
        await self._snapshot_of(loaded)
        await self._step(loaded, SMALL)
        scores = [await self._scores(each) for each in (model, loaded)]
        await self.request("POST", f"sessions/{session}/finish", json={"reason": {"type": "success"}})
        return scores

    async def _snapshot_of(self, model: str) -> None:
        """Wait for the one that follows a load."""
        store = self._api.edge.app.state.store
        async with asyncio.timeout(30):
            while not await store.read(lambda db: snapshots_of(db, model)):  # noqa: ASYNC110 (a test)
                await asyncio.sleep(0.01)

    async def _step(self, model: str, data: Any) -> None:
        await self.do("forward_backward", model_id=model, data=data, loss_fn="cross_entropy")
        await self.do("optim_step", model_id=model, adam_params={"learning_rate": 0.01})

    async def _scores(self, model: str) -> list[float]:
        outcome = await self.do("forward", model_id=model, data=SMALL, loss_fn="cross_entropy")
        return list(outcome["loss_fn_outputs"][0]["logprobs"]["data"])


def _key(number: int) -> dict[str, str]:
    return {"X-Idempotency-Key": f"program {number}"}


@dataclass(frozen=True)
class Fault:
    """The call of this number (from 1) fails with this error; `only` counts calls of one name."""

    number: int
    code: int
    only: str | None = None


async def fail_calls(
    settings: Settings,
    kinds: frozenset[str],
    patch: pytest.MonkeyPatch,
    choose: Callable[[list[str]], Sequence[Fault]],
) -> tuple[list[str], list[str]]:
    """Run the program once for each chosen call that it makes, and let that call fail.

    Every run must end with the weights of the undisturbed one, and leave a data folder with nothing damaged, nothing
    missing and nothing left over. A chosen call that does not come fails the test.

    Args:
        kinds: which kinds of calls are counted.
        choose: what is to fail, of the calls of an undisturbed run.

    Returns:
        What failed, and the codes that clients were told.
    """
    patch.setattr(store.bodies, "INLINE_LIMIT", INLINE_LIMIT)
    patch.setattr(workers.snapshots, "_AFTER_FAILURE", 0.0)
    failed: list[str] = []
    told: list[str] = []
    async with serving(settings) as api:
        with faulty_disk(settings.data_dir, patch) as disk:
            for run in range(2):  # the first makes folders that stay
                with disk.failing(0, errno.EIO, kinds):
                    expected = await Client(api, disk).program(run)
            for run, fault in enumerate(choose(list(disk.seen)), start=2):
                client = Client(api, disk)
                with disk.failing(fault.number, fault.code, kinds, fault.only):
                    assert await client.program(run) == expected, disk.fired
                assert disk.fired is not None, f"{fault} never came"
                failed.append(disk.fired)
                told += client.refusals
        await api.edge.app.state.services.housekeeping.sweep()
        await asyncio.to_thread(_whole, settings.data_dir)
    _whole(settings.data_dir)
    return failed, told


def every(calls: list[str], code: int | None = None) -> list[Fault]:
    """Each call, with this code, or in turn with each of `CODES`."""
    return [Fault(number, code or CODES[number % len(CODES)]) for number in range(1, len(calls) + 1)]


def one_of_each(calls: list[str]) -> list[Fault]:
    """The first call of each kind on each kind of file, in turn with each of `CODES`."""
    return [Fault(1, CODES[place % len(CODES)], call) for place, call in enumerate(dict.fromkeys(calls))]


def _whole(data_dir: Path) -> None:
    """The data folder has nothing damaged, nothing missing and nothing left over.

    But for snapshots that nothing came of, which the next start removes.
    """
    checks = {check.name: check for check in check_data_folder(data_dir)}
    found = {name: [item for item in checks[name].items if "snapshots/" not in item] for name in FOLDER_CHECKS}
    assert not any(found.values()), found
    assert all(check.status != "fail" for check in checks.values()), checks
