"""A pipe that breaks in the middle of a message ends the process at its other end: nobody is left behind or waits."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from schemas.pipes import read_message
from tests.workers.group_contract import SPEC
from workers.environment import worker_environment
from workers.messages import PICKLE_PROTOCOL, Call, Ping, Progress, Start
from workers.rank_process import RankProcess

LONG = pickle.dumps(Call(1, "forward_backward", (os.urandom(200_000),), {}), PICKLE_PROTOCOL)
UNREADABLE = pickle.dumps(Ping(1), PICKLE_PROTOCOL).replace(b"Ping", b"Pong")


def _rank() -> subprocess.Popen[bytes]:
    """A rank that has loaded its toy model."""
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=worker_environment(SPEC, os.environ),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps(Start(SPEC, 0), PICKLE_PROTOCOL))
    process.stdin.flush()
    while isinstance(read_message(process.stdout), Progress):
        pass
    return process


@pytest.mark.parametrize("part", [0, 1, 100, 70_000, len(LONG) - 1])
def test_a_rank_ends_with_a_server_that_was_killed_while_it_wrote(part: int) -> None:
    process = _rank()
    _, said = process.communicate(LONG[:part], timeout=60)
    assert process.returncode == 0
    assert b"Traceback" not in said


def test_a_rank_that_cannot_read_a_message_ends_and_says_why() -> None:
    process = _rank()
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(UNREADABLE)
    process.stdin.flush()
    assert process.wait(60) == 1, "its input is open, but nothing that comes is read any more"
    assert b"Pong" in process.stderr.read()
    process.communicate()


@pytest.mark.parametrize("answer", [LONG[:1000], UNREADABLE], ids=["a part", "unreadable"])
def test_a_server_ends_a_rank_whose_answer_cannot_be_read(tmp_path: Path, answer: bytes) -> None:
    (tmp_path / "answer").write_bytes(answer)
    hung = tmp_path / "python"
    hung.write_text(f"#!/bin/sh\ncat {tmp_path / 'answer'}\nexec >&- sleep 600\n")
    hung.chmod(0o700)
    ended, reasons = threading.Event(), []

    def on_end(_: RankProcess, reason: str) -> None:
        reasons.append(reason)
        ended.set()

    process = RankProcess(Start(SPEC, 0), dict(os.environ), lambda *_: None, on_end, python=str(hung))
    assert ended.wait(60)
    assert "SIGKILL" in reasons[0]
    process.wait_stopped(0)
