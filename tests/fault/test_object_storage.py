"""Real servers whose checkpoints are in a real object storage: killed in the midst of uploads, followed by another one
on an empty disk, and left alone by a storage that goes away."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from app.backup import back_up
from schemas.fail_points import POINTS
from tests.fault.harness import CLIENT_SECONDS, MODEL, Kill, Service, example, fail_at, sdk, serving, train
from tests.support.object_server import CREDENTIALS, SECRET, ObjectServer, object_server

UPLOAD_PLACES = {"upload.begun": 2, "upload.file": 3, "upload.complete": 1}
"""Of the server while it uploads: which time that it comes there it dies."""


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in the usual variables, for the servers that a test starts."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def everything_whole(server: ObjectServer, data_dir: Path) -> set[str]:
    """What the storage holds is exactly what rows name, each file with its checksum; returns the names of folders."""
    with closing(sqlite3.connect(f"file:{data_dir / 'tinsmith.db'}?mode=ro", uri=True)) as database:
        rows = dict(database.execute("SELECT folder, size_bytes FROM checkpoints"))
    keys = set(server.keys("s")) - {"owner.json"}
    expected = set()
    for folder, size in rows.items():
        listed = json.loads(server.read("s", f"complete/{folder}.json"))["files"]
        expected |= {f"complete/{folder}.json", *(f"checkpoints/{folder}/{name}" for name in listed)}
        for name, file in listed.items():
            content = server.read("s", f"checkpoints/{folder}/{name}")
            assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])
        assert sum(file["size"] for file in listed.values()) == size
    assert keys == expected
    return set(rows)


def save_repeatedly(client: Any, enough: Callable[[int], bool]) -> list[str]:
    """Train and save in turn until there are enough; every save must succeed, whoever dies."""
    paths: list[str] = []
    while not enough(number := len(paths)):
        train(client, 1)
        paths.append(client.save_state(f"state-{number}").result(timeout=CLIENT_SECONDS).path)
    client.save_weights_for_sampler("newest").result(timeout=CLIENT_SECONDS)
    return paths


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", UPLOAD_PLACES)
def test_a_server_that_dies_in_an_upload_leaves_no_half_checkpoint(tmp_path: Path, base: Path, place: str) -> None:
    assert place in POINTS
    with object_server() as server:
        marks, kill = tmp_path / "marks", Kill(place, "edge", UPLOAD_PLACES[place])
        options = server.arguments("s")
        with serving(tmp_path, base, *options, fail_at=fail_at(marks, [kill])) as service:
            client = sdk(service).create_lora_training_client(base_model=MODEL, rank=4, seed=1)
            paths = save_repeatedly(client, lambda saved: saved == 3)
            assert service.starts == 2
            assert (marks / kill.name).exists()
            for path in paths:
                again = sdk(service).create_training_client_from_state_with_optimizer(path)
                train(again, 1)
        assert len(everything_whole(server, tmp_path / "data")) == 4


@pytest.mark.exhaustive
def test_servers_that_die_at_any_moment_of_uploads(tmp_path: Path, base: Path) -> None:
    with object_server() as server:
        options = server.arguments("s")
        with serving(tmp_path, base, *options) as service:
            client = sdk(service).create_lora_training_client(base_model=MODEL, rank=4, seed=1)
            generator = random.Random(5)

            def kill() -> None:
                for _ in range(4):
                    time.sleep(generator.uniform(0.2, 2.0))
                    service.kill_server()
                    service.wait_until_ready()

            killer = threading.Thread(target=kill)
            killer.start()
            paths = save_repeatedly(client, lambda saved: not killer.is_alive())
            assert service.starts == 5
        folders = everything_whole(server, tmp_path / "data")
        assert len(folders) == len(paths) + 1


@pytest.mark.exhaustive
def test_another_server_on_an_empty_disk_goes_on(tmp_path: Path, base: Path) -> None:
    """Train, save, sample, download; then the same from the storage, with a copy of the database and nothing else."""
    with object_server() as server:
        options = server.arguments("s")
        with serving(tmp_path / "one", base, *options) as service:
            client = sdk(service).create_lora_training_client(base_model=MODEL, rank=4, seed=1)
            train(client, 3)
            state = client.save_state("state").result(timeout=CLIENT_SECONDS).path
            sampler = client.save_weights_for_sampler("sampler").result(timeout=CLIENT_SECONDS).path
            drawn, archive = _sampled(service, sampler), _archive(service, sampler)
            train(client, 2)
            final = client.save_state("final").result(timeout=CLIENT_SECONDS).path
            expected = service.saved(final)
            back_up(service.data_dir, tmp_path / "two" / "data", links=False)
            shutil.rmtree(tmp_path / "two" / "data" / "snapshots", ignore_errors=True)
            assert SECRET not in service.log.read_text()
        assert not (tmp_path / "two" / "data" / "checkpoints").exists()
        with serving(tmp_path / "two", base, *options) as service:
            assert _sampled(service, sampler) == drawn
            assert _archive(service, sampler) == archive
            again = sdk(service).create_training_client_from_state_with_optimizer(state)
            train(again, 2)
            saved = service.saved(again.save_state("final").result(timeout=CLIENT_SECONDS).path)
            assert saved == expected, "weights and moments, bit for bit"


@pytest.mark.exhaustive
def test_the_storage_goes_away_and_comes_back(tmp_path: Path, base: Path) -> None:
    with object_server() as server, serving(tmp_path, base, *server.arguments("s")) as service:
        client = sdk(service).create_lora_training_client(base_model=MODEL, rank=4, seed=1)
        train(client, 1)
        server.hang()
        failing = client.save_state("lost")
        began = time.monotonic()
        train(client, 3)
        assert time.monotonic() - began < 60
        with pytest.raises(tinker.TinkerError, match="could not be written"):
            failing.result(timeout=CLIENT_SECONDS)
        server.go_on()
        client.save_state("lost").result(timeout=CLIENT_SECONDS)
        service.kill_server()
        service.wait_until_ready()
        train(client, 1)
        assert len(everything_whole(server, service.data_dir)) == 1


def _sampled(service: Service, path: str) -> list[int]:
    sampler = sdk(service).create_sampling_client(model_path=path)
    prompt = types.ModelInput.from_ints(example(1).model_input.to_ints()[:5])
    params = types.SamplingParams(max_tokens=8, seed=7, temperature=1.0)
    sequences = sampler.sample(prompt, 1, params).result(timeout=CLIENT_SECONDS).sequences
    return list(sequences[0].tokens)


def _archive(service: Service, path: str) -> bytes:
    run, kind, name = path.removeprefix("tinker://").split("/")
    route = f"{service.url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    answer = httpx.get(route, headers={"X-API-Key": service.key}, follow_redirects=True, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content
