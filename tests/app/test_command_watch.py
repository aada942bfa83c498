"""Following a run: over a stream that breaks, to the run's end, as lines and as charts."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from typer.testing import CliRunner

from app import cli
from app.commands import watch
from app.commands.client import Server
from app.commands.output import FAILED, UNREACHABLE
from app.commands.watch import Watch
from tests.support.scripted_server import reply, scripted

KEY = "tml-" + "k" * 43
RUN = "s:train:0"


def point(step: int, loss: float | None, *, done: bool = True) -> dict[str, Any]:
    """A step as the server tells it; numbers that it has not measured are absent."""
    told = {"step": step, "done": done, "merged": 1, "tokens": 8, "learning_rate": 0.01, "grad_norm": 2.0 / step}
    return told if loss is None else {**told, "loss_per_token": loss}


def event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


class Run:
    """A run whose events come in several streams, each broken off after its part."""

    def __init__(self, *streams: bytes, broken: bool = True) -> None:
        self.streams = list(streams)
        self.broken = broken
        self.asked: list[str] = []

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path)
        if "/metrics" in handler.path:
            points = [point(1, 3.0), point(2, 2.0), point(3, 1.5, done=False)]
            reply(handler, 200, json.dumps({"training_run_id": RUN, "points": points}).encode())
            return
        if not self.streams:
            reply(handler, 404, b'{"detail": "no model", "error": {"hint": null}}')
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        part = self.streams.pop(0)
        handler.send_header("Content-Length", str(len(part) + (100 if self.broken and self.streams else 0)))
        handler.end_headers()
        handler.wfile.write(part)
        handler.close_connection = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RECONNECT_SECONDS", (0.001, 0.001))


def watched(url: str, *options: str) -> Any:
    return CliRunner().invoke(cli.app, ["runs", "watch", RUN, "--url", url, "--api-key", KEY, *options])


def test_lines_come_once_for_each_step_over_broken_streams_until_the_run_ends() -> None:
    run = Run(
        event("points", {"points": [point(3, 1.0)]}) + b": still here\n\n",
        event("points", {"points": [point(4, None)]}) + event("state", {"state": "closed"}),
    )
    with scripted(run) as url:
        done = watched(url)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][0] == "step"
    assert [(line[0], line[1]) for line in lines[1:]] == [("1", "3"), ("2", "2"), ("3", "1"), ("4", "-")]
    assert "closed" in done.stderr
    assert [path.partition("?")[2] for path in run.asked[1:]] == ["after=2", "after=3"]


def test_a_run_is_followed_over_a_restart_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RECONNECT_SECONDS", (0.001,) * 4)
    refusals = [503, 503]

    def restarted(handler: BaseHTTPRequestHandler) -> None:
        if "/events" in handler.path and len(run.asked) > 1 and refusals:
            busy = {"detail": "the server is starting", "error": {"code": "unavailable", "hint": None}}
            reply(handler, refusals.pop(), json.dumps(busy).encode())
        else:
            run(handler)

    run = Run(
        event("points", {"points": [point(3, 1.0)]}),
        event("points", {"points": [point(4, 0.5)]}) + event("state", {"state": "closed"}),
        broken=False,
    )
    with scripted(restarted) as url:
        done = watched(url)
    assert (done.exit_code, refusals) == (0, []), done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["step", "1", "2", "3", "4"]
    assert done.stderr.splitlines() == [f"the run is {watch.AWAY}", "the run is closed"]


def test_once_and_json_do_not_wait() -> None:
    run = Run()
    with scripted(run) as url:
        assert len(watched(url, "--once").stdout.splitlines()) == 3
        document = json.loads(watched(url, "--json").stdout)
    assert (document["kind"], len(document["data"]["points"])) == ("metrics", 3)
    assert len(run.asked) == 2


def test_a_server_that_goes_away_is_told_and_so_is_one_without_metrics() -> None:
    run = Run(b"", b"", b"", b"")
    with scripted(run) as url:
        done = watched(url)
    assert (done.exit_code, "does not speak http" in done.stderr or "no server" in done.stderr) == (UNREACHABLE, True)
    missing = b'{"detail": "there is no GET /api/v1/x (see /docs)", "error": {"hint": "see /docs"}}'
    with scripted(lambda handler: reply(handler, 404, missing)) as url:
        done = watched(url)
    assert done.exit_code == FAILED
    assert "another version" in done.stderr.splitlines()[0]
    assert "tinsmith status" in done.stderr.splitlines()[1]


def test_charts_are_text_only_and_end_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    import io

    from rich.console import Console

    run = Run(event("points", {"points": [point(3, 1.0)]}) + event("state", {"state": "[red]lost\x1b[2J"}), b"")
    with scripted(run) as url:
        following = Watch(Server(url, KEY), RUN)
        following.show(lines=True, once=True)
        news = following._news()
        for _ in range(3):
            next(news)
        shown = io.StringIO()
        Console(file=shown, force_terminal=True, width=60, color_system=None).print(following._screen(60))
    text = shown.getvalue()
    assert "step 3" in text
    assert "[red]lost\\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert all(title in text for title in ("loss per token  1", "learning rate  0.01", "gradient norm  0.6667"))
    assert max(map(len, text.splitlines())) <= 60
