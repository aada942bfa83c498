"""The server process is killed and started again on the same data folder."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL
from tests.support.api import DATA
from tests.support.server import RunningServer, serve


def _post(http: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _result(http: httpx.Client, request_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = http.post("retrieve_future", json={"request_id": request_id})
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            return dict(answer.json())
    raise AssertionError("no outcome within 60 s")


def _do(http: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    outcome = _result(http, _post(http, route, **body)["request_id"])
    assert "error" not in outcome, outcome
    return outcome


@pytest.fixture
def arguments(tiny_folder: Path) -> list[str]:
    """Of both servers."""
    return ["--base-model", f"{MODEL}={tiny_folder}", "--threads", "1", "--poll-hold", "1"]


def _kill(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


@pytest.mark.slow
def test_what_was_promised_before_a_kill_is_settled_after_it(tmp_path: Path, arguments: list[str]) -> None:
    with serve(tmp_path / "data", arguments) as server, server.client() as http:
        session = _post(http, "create_session", sdk_version="test")["session_id"]
        lora = {"rank": 4, "seed": 1}
        model = _do(http, "create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config=lora)[
            "model_id"
        ]
        batch = {"model_id": model, "data": DATA, "loss_fn": "cross_entropy"}
        _do(http, "forward_backward", seq_id=1, **batch)
        _do(http, "optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.01})
        scored = _post(http, "forward", seq_id=3, **batch)["request_id"]
        scores = _result(http, scored)
        path = _do(http, "save_weights", model_id=model, seq_id=4, path="kept")["path"]
        opened = _do(http, "save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=0)
        sampler = opened["sampling_session_id"]
        waiting = _post(http, "optim_step", model_id=model, seq_id=7, adam_params={})["request_id"]
        long = {"stop": [], "max_tokens": 250}
        cut = _post(http, "asample", sampling_session_id=sampler, prompt=[5], num_samples=8, sampling_params=long)
        _kill(server)
    with serve(tmp_path / "data", arguments) as server, server.client() as http:
        assert _result(http, scored) == scores
        assert _post(http, "forward", seq_id=3, **batch)["request_id"] == scored
        assert len(_result(http, cut["request_id"])["sequences"]) == 8
        again = _do(http, "forward", model_id=model, seq_id=6, data=DATA, loss_fn="cross_entropy")
        assert again["loss_fn_outputs"] == scores["loss_fn_outputs"]
        assert "error" not in _result(http, waiting)
        drawn = _do(
            http,
            "asample",
            sampling_session_id=sampler,
            prompt=[5, 6, 7, 8, 9],
            prompt_logprobs=True,
            sampling_params={"max_tokens": 1},
        )
        trained = scores["loss_fn_outputs"][0]["logprobs"]["data"]
        assert drawn["prompt_logprobs"][1:] == pytest.approx(trained, abs=1e-3)
        load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        resumed = _do(http, "load_weights", **load)["model_id"]
        again = _do(http, "forward", model_id=resumed, data=DATA, loss_fn="cross_entropy")
        assert again["loss_fn_outputs"] == scores["loss_fn_outputs"]
