"""SIGTERM to a real server: new work is sent away, accepted work is finished, and the end comes in a bounded time."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.doctor import check_data_folder
from tests.app.conftest import MODEL
from tests.support.processes import ended, freeze
from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

LONG = [{"model_input": [5] * 250, "loss_fn_inputs": {"target_tokens": [6] * 250}}] * 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@contextmanager
def _server(data_dir: Path, tiny: Path, grace: float) -> Iterator[tuple[RunningServer, httpx.Client]]:
    arguments = ["--base-model", f"{MODEL}={tiny}", "--threads", "1", "--poll-hold", "1"]
    with serve(data_dir, [*arguments, "--shutdown-grace", str(grace)]) as server, server.client() as client:
        yield server, client


def _post(client: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _result(client: httpx.Client, request_id: str) -> dict[str, Any]:
    for _ in range(60):
        answer = client.post("retrieve_future", json={"request_id": request_id})
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            return dict(answer.json())
    raise AssertionError("no outcome")


def _model(client: httpx.Client) -> str:
    session = _post(client, "create_session", sdk_version="test")["session_id"]
    lora = {"rank": 4, "seed": 1}
    made = _post(client, "create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config=lora)
    return str(_result(client, made["request_id"])["model_id"])


@pytest.mark.slow
def test_accepted_work_is_finished_and_new_work_sent_away(tmp_path: Path, tiny: Path) -> None:
    with _server(tmp_path / "data", tiny, 60) as (server, client):
        model = _model(client)
        accepted = [
            _post(client, "forward_backward", model_id=model, seq_id=seq, data=LONG, loss_fn="cross_entropy")
            for seq in range(1, 6)
        ]
        accepted.append(_post(client, "save_weights", model_id=model, seq_id=6, path="last"))
        server.process.send_signal(signal.SIGTERM)
        refused = client.post("optim_step", json={"model_id": model, "seq_id": 7, "adam_params": {}})
        while refused.status_code == 200:  # the signal is on its way
            refused = client.post("create_session", json={"sdk_version": "late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.process.wait(timeout=70) == 0
    checks = {check.name: check for check in check_data_folder(server.data_dir)}
    assert checks["checkpoints"].detail.startswith("1, ")
    assert all(check.status == "ok" for check in checks.values()), checks
    with _server(tmp_path / "data", tiny, 60) as (server, client):
        for promise in accepted:
            assert "error" not in _result(client, promise["request_id"])


@pytest.mark.exhaustive
def test_a_hung_worker_does_not_keep_the_server(tmp_path: Path, tiny: Path) -> None:
    grace = 2.0
    with _server(tmp_path / "data", tiny, grace) as (server, client):
        model = _model(client)
        worker = server.worker()
        freeze(worker)
        promise = _post(client, "forward_backward", model_id=model, seq_id=1, data=LONG, loss_fn="cross_entropy")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        took = time.monotonic() - began
        assert grace <= took < grace + 20, took
        assert ended(worker)
    with _server(tmp_path / "data", tiny, grace) as (server, client):
        _result(client, promise["request_id"])  # it is settled: what was promised does not hang


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path: Path, tiny: Path) -> None:
    with _server(tmp_path / "data", tiny, 600) as (server, client):
        model = _model(client)
        worker = server.worker()
        freeze(worker)
        _post(client, "forward_backward", model_id=model, seq_id=1, data=LONG, loss_fn="cross_entropy")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(timeout=1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=30) == 128 + signal.SIGINT
        while not ended(worker):
            assert time.monotonic() - began < 60, "the worker outlives its server"
            time.sleep(0.05)
