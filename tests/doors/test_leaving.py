"""A client that goes away stops its decoding; what a sample used is counted, by nobody's session."""

from __future__ import annotations

import json
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from tests.doors.conftest import CHAT, MODEL, PROMPT, Doors

LONG = {"model": MODEL, "messages": CHAT, "max_tokens": 8000, "temperature": 0}
"""Greedy, the tiny model goes round in circles: it takes all its tokens, for many seconds."""


def _last(doors: Doors) -> tuple[str, dict[str, Any] | None]:
    """State and error of the newest sample that belongs to no session."""
    with sqlite3.connect(f"file:{doors.server.data_dir / 'tinsmith.db'}?mode=ro", uri=True) as db:
        state, error = db.execute(
            "select state, error from operations where scope like 'direct:%' order by created_at desc limit 1"
        ).fetchone()
    return state, None if error is None else json.loads(error)


def _wait_for_end(doors: Doors, seconds: float = 60) -> dict[str, Any] | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state, error = _last(doors)
        if state != "pending":
            return error
        time.sleep(0.05)
    raise AssertionError("it still draws")


def _counted(doors: Doors) -> dict[str, int]:
    """Tokens of samples that belong to no session, by kind."""
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    window = {"starting_on": (end - timedelta(hours=3)).isoformat(), "ending_before": end.isoformat()}
    with doors.server.client() as client:
        answer = client.get("billing/usage/events", params=window)
    assert answer.status_code == 200, answer.text
    found: dict[str, int] = {}
    for event in answer.json()["data"]:
        if event.get("session_id") is None and "token_count" in event["event_info"]:
            kind = event["event_info"]["type"]
            found[kind] = found.get(kind, 0) + event["event_info"]["token_count"]
    return found


def test_text_comes_while_it_is_drawn_and_a_stream_that_is_cut_stops_decoding(doors: Doors) -> None:
    body, before = {**LONG, "stream": True}, _counted(doors)
    with doors.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = 0
        for line in answer.iter_lines():
            lines += line.startswith("data:")
            if lines > 5:
                break
        assert _last(doors)[0] == "pending"
    error = _wait_for_end(doors)
    assert error is not None
    assert error["code"] == "cancelled"
    after = _counted(doors)
    assert after["sampling_prefill"] > before.get("sampling_prefill", 0)
    assert after["sampling_sample"] - before.get("sampling_sample", 0) >= 4, "what it had heard is counted at least"


def test_a_client_that_does_not_wait_stops_decoding(doors: Doors) -> None:
    for path in ("/v1/chat/completions", "/anthropic/api/v1/messages"):
        with doors.http() as client, pytest.raises(httpx.ReadTimeout):
            client.post(path, json=LONG, timeout=httpx.Timeout(10, read=0.7))
        error = _wait_for_end(doors)
        assert error is not None
        assert error["code"] == "cancelled"


def test_a_cut_at_each_of_the_first_events_leaves_the_server_well(doors: Doors) -> None:
    for cut in range(6):
        body = {**LONG, "stream": True, "n": 2, "max_tokens": 3000}
        with doors.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= cut:
                    break
    assert _wait_for_end(doors) is not None
    after = doors.openai().completions.create(model=MODEL, prompt="abc", max_tokens=2, temperature=0)
    assert after.usage is not None
    assert 1 <= after.usage.completion_tokens <= 2  # its end of sequence may come first


def test_tokens_are_counted_for_the_project_and_no_session(doors: Doors) -> None:
    before = _counted(doors)
    used = doors.openai().completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, n=2, temperature=0).usage
    assert used is not None
    after = _counted(doors)
    assert after["sampling_sample"] - before.get("sampling_sample", 0) == used.completion_tokens == 10
    assert after["sampling_prefill"] - before.get("sampling_prefill", 0) == used.prompt_tokens
