"""Ranks in an interpreter of their own: which one, what is asked of it first, and what is said when it cannot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engines.environments import check_in, engine_interpreter, environment_python
from schemas.errors import Unavailable
from tests.support.environments import empty_environment, like_this_one
from tests.support.tiny_model import make_tiny_model
from workers.interpreter import ready_interpreter
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without any package."""
    return empty_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """The interpreter of an environment with the packages of this one."""
    return like_this_one(tmp_path / "full")


def test_which_interpreter(tmp_path: Path) -> None:
    assert engine_interpreter("torch") is None
    assert engine_interpreter("veomni") == environment_python("veomni") == ROOT / ".engines/veomni/bin/python"
    assert engine_interpreter("veomni", "/opt/python") == Path("/opt/python")
    assert engine_interpreter("torch", "~/python") == Path.home() / "python"
    assert ready_interpreter(WorkerSpec("tiny", None, str(tmp_path))) == sys.executable


def test_an_environment_that_cannot_be_used_says_why_and_what_to_do(tmp_path: Path, empty: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho nonsense\n", encoding="utf-8")
    program.chmod(0o755)
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    slow.chmod(0o755)
    for python, words in (
        (tmp_path / "absent", "needs an environment of its own, and there is none"),
        (program, "does not run"),
        (slow, "did not answer within 1 s"),
        (empty, "'veomni' needs the Python package"),
    ):
        with pytest.raises(Unavailable, match=words) as caught:
            check_in(python, "veomni", timeout=1 if python is slow else 120)
        assert "make engine-venv NAME=veomni" in (caught.value.hint or "")


def program_of(pid: int) -> str:
    """What a process was started as."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


@pytest.mark.slow
async def test_ranks_run_in_the_interpreter_that_is_given(tmp_path: Path, full: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    spec = WorkerSpec("tiny", str(folder), str(tmp_path), device="cpu", threads=1, engine_python=str(full))
    group = LocalWorkerGroup(spec, start_timeout=300)
    info = await group.start()
    try:
        assert info.num_layers == 2
        (pid,) = group.pids
        assert program_of(pid) == str(full)
    finally:
        await group.stop()


def test_ranks_of_a_cluster_need_its_version_of_ray(tmp_path: Path, full: Path) -> None:
    spec = WorkerSpec("tiny", "there", str(tmp_path), engine_python=str(full))
    with pytest.raises(Unavailable, match=r"the cluster's is 0\.0\.1"):
        ready_interpreter(spec, ray="0.0.1")


async def test_no_rank_starts_where_the_environment_is_missing(tmp_path: Path) -> None:
    spec = WorkerSpec("tiny", str(tmp_path), str(tmp_path), engine="veomni", engine_python=str(tmp_path / "absent"))
    for each in (spec, replace(spec, ranks=2)):
        group = LocalWorkerGroup(each, start_timeout=60)
        with pytest.raises(Unavailable, match="environment of its own"):
            await group.start()
        assert group.pids == []


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    """`tinsmith serve` ends with it, and with no traceback."""
    folder = make_tiny_model(tmp_path / "model")
    options = ["--engine", "veomni", "--engine-python", str(tmp_path / "absent"), "--port", "0"]
    options += ["--data-dir", str(tmp_path / "data"), "--base-model", f"tiny={folder}"]
    served = subprocess.run(
        [sys.executable, "-c", "from app.cli import main; main()", "serve", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert served.returncode == 1, served.stderr
    (line,) = [each for each in served.stderr.splitlines() if "cannot be served" in each]
    assert "engine 'veomni' needs an environment of its own" in line
    assert "make engine-venv NAME=veomni" in served.stderr
    assert "Traceback" not in served.stderr
