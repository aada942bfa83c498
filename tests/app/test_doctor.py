"""`tinsmith doctor`: it finds what is wrong, only that, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app import cli
from app.checks import Check
from app.doctor import check_data_folder
from app.settings import Settings
from tests.support.api import Api
from tests.support.data_folder import fill, make_data_folder

runner = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A data folder of a server that was stopped; not to be changed."""
    folder = tmp_path_factory.mktemp("made") / "data"
    make_data_folder(folder, tiny_folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def _by_name(data_dir: Path) -> dict[str, Check]:
    return {check.name: check for check in check_data_folder(data_dir)}


def _bad(data_dir: Path) -> dict[str, str]:
    """Status of every check that is not ok."""
    return {check.name: check.status for check in check_data_folder(data_dir) if check.status != "ok"}


def _picture(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / "tinsmith.db")) as connection, connection:
        yield connection


def _checkpoint(folder: Path, file: str) -> Path:
    return sorted((folder / "checkpoints").glob(f"*/{file}"))[0]


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_whole_folder_is_found_whole_and_left_as_it_is(folder: Path) -> None:
    before = _picture(folder)
    checks = _by_name(folder)
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(checks, "ok")
    assert set(checks) >= {"data folder", "database", "schema", "keys", "checkpoints", "bodies", "left over"}
    assert checks["checkpoints"].detail.startswith("3, ")
    assert _picture(folder) == before


def _flip_weights(folder: Path) -> None:
    _flip(_checkpoint(folder, "adapter_model.safetensors"))


def _flip_optimizer(folder: Path) -> None:
    _flip(_checkpoint(folder, "optimizer.safetensors"))


def _no_config(folder: Path) -> None:
    _checkpoint(folder, "adapter_config.json").unlink()


def _broken_manifest(folder: Path) -> None:
    _checkpoint(folder, "tinsmith.json").write_text("[]")


def _no_checkpoint(folder: Path) -> None:
    shutil.rmtree(_checkpoint(folder, "tinsmith.json").parent)


def _grown_checkpoint(folder: Path) -> None:
    _checkpoint(folder, "tinsmith.json").with_name("more").write_text("x")


def _flip_body(folder: Path) -> None:
    _flip(next((folder / "bodies").iterdir()))


def _no_body(folder: Path) -> None:
    next((folder / "bodies").iterdir()).unlink()


def _short_pepper(folder: Path) -> None:
    (folder / "pepper").write_bytes(b"short")


def _open_key(folder: Path) -> None:
    (folder / "dev_key").chmod(0o644)


def _open_folder(folder: Path) -> None:
    folder.chmod(0o755)


def _orphan_row(folder: Path) -> None:
    with _database(folder) as connection:
        connection.execute("UPDATE checkpoints SET project_id = 'nobody'")


def _newer(folder: Path) -> None:
    with _database(folder) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")


def _torn_database(folder: Path) -> None:
    """Bytes in the middle of pages of tables and indexes."""
    file = folder / "tinsmith.db"
    data = bytearray(file.read_bytes())
    for page in range(2, len(data) // 4096):
        data[page * 4096 + 8 : page * 4096 + 200] = bytes(192)
    file.write_bytes(data)


def _no_database(folder: Path) -> None:
    (folder / "tinsmith.db").write_bytes(b"this is no database at all" * 500)


def _strays(folder: Path) -> None:
    (folder / "checkpoints" / ("0" * 32)).mkdir()
    (folder / "bodies" / f"x.request.{'0' * 32}").write_bytes(b"x")


@pytest.mark.parametrize(
    ("damage", "check", "status"),
    [
        (_flip_weights, "checkpoints", "fail"),
        (_flip_optimizer, "checkpoints", "fail"),
        (_no_config, "checkpoints", "fail"),
        (_broken_manifest, "checkpoints", "fail"),
        (_no_checkpoint, "checkpoints", "fail"),
        (_grown_checkpoint, "checkpoints", "fail"),
        (_flip_body, "bodies", "fail"),
        (_no_body, "bodies", "fail"),
        (_short_pepper, "keys", "fail"),
        (_open_key, "keys", "warn"),
        (_open_folder, "data folder", "warn"),
        (_orphan_row, "database", "fail"),
        (_newer, "schema", "fail"),
        (_torn_database, "database", "fail"),
        (_no_database, "database", "fail"),
        (_strays, "left over", "warn"),
    ],
)
def test_each_damage_is_found_and_nothing_else(
    folder: Path, damage: Callable[[Path], None], check: str, status: str
) -> None:
    damage(folder)
    before = _picture(folder)
    assert _bad(folder) == {check: status}
    assert _picture(folder) == before


def test_a_newer_folder_is_told_with_both_versions(folder: Path) -> None:
    _newer(folder)
    detail = _by_name(folder)["schema"].detail
    assert "schema 9999" in detail
    assert "newest is 0001" in detail or "newest is 000" in detail


async def test_beside_a_running_server_and_on_a_copy_of_what_a_killed_one_leaves(api: Api, tmp_path: Path) -> None:
    model = await fill(api)
    data_dir = api.edge.settings.data_dir
    checks = _by_name(data_dir)
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(checks, "ok")
    assert f"process id {os.getpid()}" in checks["data folder"].detail
    copy = Path(shutil.copytree(data_dir, tmp_path / "killed"))
    assert (copy / "tinsmith.db-wal").stat().st_size > 0
    before = _picture(copy)
    (copy / "lock").unlink()
    assert _bad(copy) == {}
    before.pop("lock")
    assert _picture(copy) == before
    await api.train(model)


def test_the_command_ends_with_0_or_1_and_writes_a_table_or_json(
    folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["doctor", "--data-dir", str(folder), "--base-model", f"acme/tiny={tiny_folder}", "--port"]
        found = runner.invoke(cli.app, [*arguments, "0", "--json"])
        refused = runner.invoke(cli.app, [*arguments, port])
    document = json.loads(found.stdout)
    report = document["data"]
    assert document["kind"] == "doctor"
    assert (found.exit_code, report["ok"]) == (0, True), found.output
    named = {check["name"]: check for check in report["checks"]}
    assert {
        "disk",
        "port",
        "engine",
        "compute",
        "gpu",
        "memory",
        "open files",
        "model acme/tiny",
        "versions",
    } <= named.keys()
    assert named["engine"]["detail"] == "torch, in the server's own environment"
    assert "1 threads" in named["compute"]["detail"]
    assert "float32" in named["compute"]["detail"] or "bfloat16" in named["compute"]["detail"]
    assert "SDK tinker" in named["versions"]["detail"]
    assert refused.exit_code == 1
    assert "fail  port" in refused.stdout
    assert "the port is in use" in refused.stdout


def test_an_engine_that_cannot_run_is_told(tmp_path: Path) -> None:
    from app.doctor_machine import _engine

    check, python = _engine(Settings(engine="veomni", engine_python=tmp_path / "absent"))
    assert (check.status, python) == ("fail", sys.executable)
    assert "environment of its own" in check.detail
    assert "make engine-venv NAME=veomni" in check.items[0]


def test_a_model_that_does_not_fit_is_told(tmp_path: Path, folder: Path) -> None:
    from app.doctor_machine import _memory

    model = tmp_path / "large"
    model.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 20, 1 << 10], "data_offsets": [0, 1 << 32]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    settings = Settings(data_dir=folder, base_model=[f"acme/large={model}"])
    plan = {"device": "cpu", "dtype": "bfloat16", "total": 2 << 30, "free": 2 << 30}
    [source] = settings.base_model
    assert _memory(settings, source, plan, None).status == "warn"  # it fits, and leaves nothing for training
    assert _memory(settings, source, {**plan, "dtype": "float32"}, None).status == "fail"
    assert _memory(settings, source, {**plan, "total": 8 << 30, "free": 8 << 30}, None).status == "ok"


def test_gpus_memory_and_clients_are_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from app import doctor_machine

    plan = {"device": "cuda:0", "gpus": ["GPU A", "GPU B", "GPU A"]}
    assert doctor_machine._gpus(plan).detail == "2 x GPU A, 1 x GPU B"
    assert "not used" in doctor_machine._gpus({**plan, "device": "cpu"}).detail
    driver = tmp_path / "version"
    monkeypatch.setattr(doctor_machine, "GPU_DRIVER", driver)
    assert doctor_machine._gpus({"gpus": []}).detail == "none"
    driver.touch()
    assert doctor_machine._gpus({"gpus": []}).status == doctor_machine._gpus({"error": "x"}).status == "warn"
    monkeypatch.setattr(doctor_machine, "machine_memory", lambda: (8 << 30, 100 << 20))
    assert (doctor_machine._main_memory(None).status, doctor_machine._main_memory("7").status) == ("warn", "ok")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    assert doctor_machine._open_files().status == "warn"
    for number, status in {"0.15.9": "warn", "0.16.1": "ok", "0.38.0": "ok", "0.39.0": "warn", "1.0": "warn"}.items():
        monkeypatch.setattr(doctor_machine, "_version", lambda name, number=number: number)
        assert doctor_machine._versions().status == status, number


def test_the_tested_versions_of_the_sdk_are_those_of_the_page() -> None:
    from app.doctor_machine import SDK_VERSIONS, _major_minor

    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    tested = [_major_minor(number) for number in re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, flags=re.MULTILINE)]
    assert (min(tested), max(tested)) == SDK_VERSIONS


def test_a_folder_without_a_database_is_one_clear_line(tmp_path: Path) -> None:
    found = {check.name: check for check in check_data_folder(tmp_path / "nothing")}
    assert found["database"].status == "fail"
    assert "no data folder" in found["database"].detail
    assert not (tmp_path / "nothing").exists()
