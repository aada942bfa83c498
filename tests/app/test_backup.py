"""`tinsmith backup`: a consistent copy while the server works, which opens as a data folder; or nothing at all."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import app.backup
import store.bodies
from app import cli
from app.backup import back_up
from app.doctor import check_data_folder
from app.settings import Settings
from engines.checkpoint_files import folder_problems
from schemas.errors import AlreadyExists, InvalidRequest, Unavailable
from store.added_models import AddedModel, read_added, write_added
from tests.support.api import Api, serving
from tests.support.data_folder import LARGE, make_data_folder

runner = CliRunner()
WORDS = ("data folder", "database", "schema", "keys", "checkpoints", "bodies", "snapshots", "left over")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A data folder of a server that was stopped; not to be changed."""
    folder = tmp_path_factory.mktemp("made") / "data"
    make_data_folder(folder, tiny_folder)
    return folder


def _healthy(folder: Path) -> None:
    checks = {check.name: check for check in check_data_folder(folder)}
    assert {name: (checks[name].status, checks[name].items) for name in WORDS} == dict.fromkeys(WORDS, ("ok", ()))


async def _train(api: Api, until: asyncio.Event, rounds: Counter[int], number: int) -> str:
    """Steps with large bodies; every one saved under the same name, beside one of its own; deletes too.

    Counts its rounds under its number; returns the model's id.
    """
    session = await api.session()
    model = await api.model(session)
    while not until.is_set():
        count = rounds[number]
        await api.do("forward", model_id=model, data=LARGE[:1], loss_fn="cross_entropy")
        await api.train(model)
        await api.do("save_weights", model_id=model, path="same", overwrite=True)
        await api.do("save_weights_for_sampler", model_id=model, path=f"s{count}")
        if count % 2:
            route = f"training_runs/{model}/checkpoints/sampler_weights/s{count - 1}"
            assert (await api.client.delete(route)).status_code == 204
        await api.edge.app.state.services.housekeeping.sweep()
        rounds[number] += 1
    return model


async def test_copies_made_while_clients_train_open_and_go_on(
    tiny_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.bodies, "INLINE_LIMIT", 200)  # so that bodies of one datum are in files, too
    lines: list[str] = []
    until = asyncio.Event()
    async with serving(tiny_settings(poll_hold=0.5)) as api:
        data_dir = api.edge.settings.data_dir
        rounds: Counter[int] = Counter()
        training = [asyncio.create_task(_train(api, until, rounds, number)) for number in range(2)]
        copies = []
        for number in range(6):
            while min(rounds[0], rounds[1]) <= number and not any(task.done() for task in training):  # noqa: ASYNC110
                await asyncio.sleep(0.03)
            copies.append(tmp_path / f"copy{number}")
            done = await asyncio.to_thread(back_up, data_dir, copies[-1], links=number % 2 == 0, tell=lines.append)
            assert (done.missing, done.linked > 0) == ([], number % 2 == 0)
        until.set()
        trained = await asyncio.gather(*training)
    assert any(line.startswith("database: ") for line in lines)
    for copy in copies:
        await asyncio.to_thread(_healthy, copy)
        assert copy.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(data_dir)  # a copy needs nothing of it
    async with serving(tiny_settings(data_dir=copies[-1])) as again:
        assert again.client.headers["X-API-Key"] == api.client.headers["X-API-Key"]
        listed = (await again.client.get("checkpoints")).json()["checkpoints"]
        [same, *_] = [each["tinker_path"] for each in listed if each["tinker_path"].endswith("/weights/same")]
        load = {"session_id": await again.session(), "model_seq_id": 0, "path": same, "optimizer": True}
        model = (await again.do("load_weights", **load))["model_id"]
        await again.train(model)
        await again.do("save_weights", model_id=model, path="after")
        for live in trained:  # what was being trained goes on, too
            await again.train(live)


def test_a_copy_of_a_stopped_folder_by_the_command(made: Path, tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()  # an empty one may be there
    done = runner.invoke(cli.app, ["backup", str(tmp_path / "dest"), "--data-dir", str(made), "--copy"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'dest'}: 3 checkpoints, ")
    assert "database: " in done.stderr
    _healthy(tmp_path / "dest")
    names = {path.name for path in (tmp_path / "dest").iterdir()}
    assert names == {"tinsmith.db", "pepper", "dev_key", "url_secret", "token_secret", "checkpoints", "bodies"}
    files = [path for path in (tmp_path / "dest").rglob("*") if path.is_file()]
    assert all(path.stat().st_nlink == 1 for path in files)
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert not list(tmp_path.glob(".*"))


def test_links_share_the_files_and_survive_their_deletion(made: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(made, tmp_path / "source"))
    done = back_up(source, tmp_path / "dest")
    assert done.linked == sum(
        path.is_file() for place in ("checkpoints", "bodies") for path in (source / place).rglob("*")
    )
    shutil.rmtree(source)
    _healthy(tmp_path / "dest")


def test_another_disk_gets_copies(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    assert back_up(made, tmp_path / "dest").linked == 0
    _healthy(tmp_path / "dest")


def test_what_is_there_is_not_touched(made: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    with pytest.raises(AlreadyExists, match="not empty"):
        back_up(made, taken)
    with pytest.raises(AlreadyExists, match="no folder"):
        back_up(made, taken / "file")
    with pytest.raises(InvalidRequest, match="inside the data folder"):
        back_up(made, made / "copy")
    done = runner.invoke(cli.app, ["backup", str(taken), "--data-dir", str(made)])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[1:] == [
        "error: no backup was made: the destination is there already and is not empty",
        "help: give a new or an empty folder",
    ]
    assert [path.name for path in taken.iterdir()] == ["file"]


def test_no_data_folder_and_a_newer_one_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no data folder"):
        back_up(tmp_path / "nothing", tmp_path / "dest")
    source = Path(shutil.copytree(made, tmp_path / "source"))
    with closing(sqlite3.connect(source / "tinsmith.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(Unavailable, match=r"schema 9999.*newest is"):
        back_up(source, tmp_path / "dest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_disk_that_fills_up_leaves_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/secret")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(Unavailable, match=r"could not be written \(No space left on device\)"):
        back_up(made, tmp_path / "dest", links=False)
    assert list(tmp_path.iterdir()) == []


def test_what_the_data_folder_itself_lacks_is_told_and_the_rest_is_copied(made: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(made, tmp_path / "source"))
    gone = next((source / "bodies").iterdir())
    gone.unlink()
    cut = next((source / "checkpoints").iterdir())
    (cut / "adapter_model.safetensors").write_bytes(b"")
    done = runner.invoke(cli.app, ["backup", str(tmp_path / "dest"), "--data-dir", str(source)])
    assert done.exit_code == 1
    assert f"bodies/{gone.name}" in done.stderr
    assert f"checkpoints/{cut.name}" in done.stderr
    problems = {folder.name: folder_problems(folder) for folder in (tmp_path / "dest" / "checkpoints").iterdir()}
    assert [name for name, found in problems.items() if found] == [cut.name]
    assert len(problems) == 3


def test_what_a_server_removes_between_two_looks_is_not_in_the_copy(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of the database names a checkpoint and a body whose files come and go between the looks."""
    source = Path(shutil.copytree(made, tmp_path / "source"))
    real = app.backup._Copy._copy_database
    seen: list[int] = []

    def copy_database(self: Any) -> None:
        real(self)
        if not seen:
            with closing(sqlite3.connect(source / "tinsmith.db")) as connection, connection:
                folder = connection.execute("SELECT folder FROM checkpoints").fetchone()[0]
                connection.execute("DELETE FROM checkpoints WHERE folder = ?", [folder])
                ref = json.loads(
                    connection.execute("SELECT body_ref FROM operations WHERE body_ref IS NOT NULL").fetchone()[0]
                )
                connection.execute("UPDATE operations SET body_ref = NULL, result_ref = NULL, state = 'expired'")
            for root in (source, self.into):
                shutil.rmtree(root / "checkpoints" / folder)
                (root / "bodies" / ref["name"]).unlink()
        seen.append(1)

    monkeypatch.setattr(app.backup._Copy, "_copy_database", copy_database)
    done = back_up(source, tmp_path / "dest")
    assert (len(seen), done.missing, done.checkpoints) == (2, [], 2)
    _healthy(tmp_path / "dest")


def test_a_base_model_that_is_added_meanwhile_is_in_the_copy_with_its_runs(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(made, tmp_path / "source"))
    write_added(source, [AddedModel("acme/first", None)])
    both = [AddedModel("acme/first", None), AddedModel("acme/second", None)]
    real = app.backup._Copy._copy_database
    lines: list[str] = []
    seen: list[int] = []

    def copy_database(self: Any) -> None:
        if not seen:
            write_added(source, both)
        real(self)
        seen.append(1)

    monkeypatch.setattr(app.backup._Copy, "_copy_database", copy_database)
    done = back_up(source, tmp_path / "dest", tell=lines.append)
    assert (len(seen), done.missing, read_added(tmp_path / "dest")) == (2, [], both)
    assert any("base models came or went" in line for line in lines)
    assert (tmp_path / "dest" / "base_models.json").stat().st_mode & 0o777 == 0o600
    _healthy(tmp_path / "dest")
