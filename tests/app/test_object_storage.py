"""Checkpoints in an object storage, through the API: everything that works with the folder works, on any machine."""

from __future__ import annotations

import asyncio
import io
import logging
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.backup import back_up, describe
from app.doctor import check_data_folder
from app.settings import Settings
from tests.support.api import Api, serving
from tests.support.object_server import CREDENTIALS, SECRET, ObjectServer, object_server

STEPS = {"prompt": [5, 6, 7], "num_samples": 1, "sampling_params": {"max_tokens": 6, "seed": 3, "temperature": 1.0}}


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectServer]:
    """A real S3 server for all tests here; each has a prefix of its own."""
    with object_server() as server:
        yield server


@pytest.fixture
def server(objects: ObjectServer) -> Iterator[ObjectServer]:
    """The same, answering again at the end whatever a test did."""
    yield objects
    objects.go_on()


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in the usual variables."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


async def _sample(api: Api, path: str) -> list[int]:
    session = await api.session()
    made = await api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
    assert made.status_code == 200, made.text
    outcome = await api.do("asample", sampling_session_id=made.json()["sampling_session_id"], seq_id=1, **STEPS)
    return list(outcome["sequences"][0]["tokens"])


async def _archive(api: Api, path: str) -> dict[str, bytes]:
    run, kind, name = path.removeprefix("tinker://").split("/")
    moved = await api.client.get(f"training_runs/{run}/checkpoints/{kind}/{name}/archive")
    assert moved.status_code == 302, moved.text
    answer = await api.client.get(moved.headers["location"])
    assert answer.status_code == 200, answer.text
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        return {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]


async def test_a_second_server_goes_on_from_what_the_first_has_saved(
    tmp_path: Path, server: ObjectServer, tiny_settings: Callable[..., Settings], caplog: pytest.LogCaptureFixture
) -> None:
    """Save, sample, download, resume with the optimizer: on another machine, which has a copy of the database only."""
    caplog.set_level(logging.INFO)
    first = tiny_settings(data_dir=tmp_path / "a", **server.options("s"))
    async with serving(first) as api:
        model = await api.model()
        await api.train(model, steps=2)
        state = (await api.do("save_weights", model_id=model, path="state"))["path"]
        await api.do("save_weights", model_id=model, path="state", overwrite=True)
        sampler = (await api.do("save_weights_for_sampler", model_id=model, path="sampler"))["path"]
        export = (await api.do("save_weights_external", model_id=model, path="export"))["path"]
        drawn, files = await _sample(api, sampler), await _archive(api, export)
        await api.train(model, steps=2)
        scores = await api.scores(model)
        await api.edge.app.state.services.housekeeping.sweep()
    complete = [key for key in server.keys("s") if key.startswith("complete/")]
    assert len(complete) == 3, "the overwritten one is gone"
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}

    done = back_up(tmp_path / "a", tmp_path / "backup")
    assert (done.checkpoints, done.missing) == (3, [])
    assert "their files stay in s3://" in describe(done)
    assert not (tmp_path / "backup" / "checkpoints").exists()
    checks = {check.name: check for check in check_data_folder(tmp_path / "a")}
    assert checks["checkpoints"].status == checks["left over"].status == "ok"
    shutil.copytree(tmp_path / "backup", tmp_path / "b")

    second = tiny_settings(data_dir=tmp_path / "b", **server.options("s"))
    async with serving(second) as api:
        assert await _sample(api, sampler) == drawn
        assert await _archive(api, export) == files
        resumed = await api.do(
            "load_weights",
            session_id=await api.session(),
            model_seq_id=0,
            path=state,
            optimizer=True,
        )
        await api.train(resumed["model_id"], steps=2)
        assert await api.scores(resumed["model_id"]) == scores
        copied = await api.post("copy_weights", source_path=sampler, session_id=await api.session(), model_seq_id=0)
        assert copied.status_code == 200, copied.text
        assert await _sample(api, copied.json()["tinker_path"]) == drawn
    assert SECRET not in caplog.text


async def test_training_goes_on_without_the_storage(
    tmp_path: Path, server: ObjectServer, tiny_settings: Callable[..., Settings], caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings(data_dir=tmp_path / "a", **server.options("away", artifacts_timeout=1.0))
    async with serving(settings) as api:
        model = await api.model()
        before = (await api.do("save_weights", model_id=model, path="before"))["path"]
        server.hang()
        waiting = await api.submit("save_weights", model_id=model, path="during")
        began = time.monotonic()
        await api.train(model)
        trained = time.monotonic() - began
        failed = await api.result(waiting)
        assert failed["code"] == "checkpoint_not_written"
        assert "does not answer in time" in failed["error"]
        assert SECRET not in str(failed)
        for folder in (tmp_path / "a" / "checkpoints").iterdir():
            shutil.rmtree(folder)  # as if it had given way to others
        refused = await api.post("load_weights", model_id=model, path=before, optimizer=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        server.go_on()
        await api.do("load_weights", model_id=model, path=before, optimizer=False)
        await api.do("save_weights", model_id=model, path="during")
        assert trained < 30
    assert SECRET not in caplog.text


async def test_a_wait_for_the_storage_says_so(
    tmp_path: Path, server: ObjectServer, tiny_settings: Callable[..., Settings]
) -> None:
    settings = tiny_settings(data_dir=tmp_path / "a", poll_hold=0.2, **server.options("wait", artifacts_timeout=20.0))
    async with serving(settings) as api:
        model = await api.model()
        server.hang()
        request_id = await api.submit("save_weights", model_id=model, path="slow")
        async with asyncio.timeout(20):
            reason = ""
            while "uploading to the object storage" not in reason:
                answer = await api.post("retrieve_future", request_id=request_id)
                assert answer.status_code == 408, answer.text
                reason = answer.text
        server.go_on()
        assert "error" not in await api.result(request_id)


async def test_a_start_with_a_wrong_bucket_says_so(
    tmp_path: Path, server: ObjectServer, tiny_settings: Callable[..., Settings]
) -> None:
    options = server.options("bucket") | {"artifacts_url": "s3://no-such-bucket"}
    with pytest.raises(Exception, match="no such bucket"):
        async with serving(tiny_settings(data_dir=tmp_path / "a", **options)):
            raise AssertionError("it started")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///prefix", "https://bucket", "s3://key:secret@bucket", "s3://bucket/a?b=c", "s3://bucket//a"]
)
def test_other_addresses_are_refused(make_settings: Callable[..., Settings], url: str) -> None:
    with pytest.raises(ValueError, match="artifacts_url"):
        make_settings(artifacts_url=url)
