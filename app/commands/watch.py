"""Following a run: its steps as the server tells them, as charts or as lines.

Not responsible for the options (`runs.py`) or for drawing curves (`chart.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import typer

from app.commands.chart import chart, number
from app.commands.client import Server
from app.commands.output import STOPPED, plain
from app.commands.values import run_route

CURVES = (("loss per token", "loss_per_token"), ("learning rate", "learning_rate"), ("gradient norm", "grad_norm"))
HEIGHT = 5
RECONNECT_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0, 10.0, 10.0)
"""Pauses between attempts to go on with a stream that broke: a server that is started again takes up to a minute."""
AWAY = "out of sight: the server does not answer, trying again"
"""What is shown as the state of a run meanwhile."""
OVER = ("failed", "lost", "closed")
"""States from which a run does not come back."""


class Watch:
    """One run. `points` are its steps in order; a step that is told again replaces what was known of it."""

    def __init__(self, server: Server, run_id: str) -> None:
        self._server = server
        self._run_id = run_id
        self._route = run_route(run_id)
        self._points: dict[int, dict[str, Any]] = {}
        self._state: str | None = None

    def all(self) -> dict[str, Any]:
        """What the server knows of the run now."""
        answer: dict[str, Any] = self._server.get(f"{self._route}/metrics")
        return answer

    def show(self, *, lines: bool, once: bool) -> None:
        """Show the steps so far, and those that come unless `once`."""
        for point in self.all()["points"]:
            self._points[point["step"]] = point
        try:
            if lines or not sys.stdout.isatty():
                self._as_lines(once)
            elif once:
                self._print_charts()
            else:
                self._as_charts()
        except KeyboardInterrupt:
            raise typer.Exit(STOPPED) from None

    def _as_lines(self, once: bool) -> None:
        typer.echo(f"{'step':>6}  {'loss per token':>14}  {'learning rate':>13}  {'gradient norm':>13}  {'tokens':>8}")
        told, before = 0, self._state
        for _ in [None] if once else self._news():
            if self._state == AWAY != before:
                typer.echo(f"the run is {AWAY}", err=True)
            before = self._state
            for step in sorted(self._points):
                if step > told and self._points[step].get("done"):
                    told = step
                    typer.echo(_line(self._points[step]))
        if self._state in OVER:
            typer.echo(f"the run is {plain(self._state)}", err=True)

    def _print_charts(self) -> None:
        from rich.console import Console

        Console().print(self._screen(Console().width))

    def _as_charts(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console()
        with Live(self._screen(console.width), console=console, auto_refresh=False) as live:
            for _ in self._news():
                live.update(self._screen(console.width), refresh=True)

    def _screen(self, width: int) -> Any:
        """The charts as a renderable. Everything in it is text: nothing of the server's is taken for markup."""
        from rich.text import Text

        points = [self._points[step] for step in sorted(self._points)]
        done = [point for point in points if point.get("done")]
        screen = Text(no_wrap=True, overflow="crop")
        steps = done[-1]["step"] if done else 0
        screen.append(f"{plain(self._run_id)}  step {steps}  {plain(self._state or '')}\n", style="bold")
        for title, key in CURVES:
            last = done[-1].get(key) if done else None
            screen.append(f"{title}  {number(last)}\n", style="cyan")
            screen.append("\n".join(chart([point.get(key) for point in done], min(width, 120), HEIGHT)) + "\n")
        return screen

    def _news(self) -> Iterator[None]:
        """Yields whenever something changed, first at once; ends with the run."""
        yield
        failures = 0
        while self._state not in OVER:
            try:
                for event, data in self._events():
                    failures = 0
                    for point in data.get("points", []) if event == "points" else []:
                        self._points[point["step"]] = point
                    if event == "state":
                        self._state = str(data.get("state"))
                    yield
            except ConnectionError:
                failures += 1
                if failures > len(RECONNECT_SECONDS):
                    raise self._server.unreachable() from None
                self._state = AWAY
                yield
                time.sleep(RECONNECT_SECONDS[failures - 1])

    def _events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Server-sent events of the run from the last finished step on, until the stream ends."""
        after = max((step for step, point in self._points.items() if point.get("done")), default=0)
        event = "message"
        for line in self._server.stream_lines("GET", f"{self._route}/events", query={"after": after}, again=True):
            name, _, value = line.partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data":
                with suppress(ValueError):
                    data = json.loads(value)
                    if isinstance(data, dict):
                        yield event, data
                event = "message"


def _line(point: dict[str, Any]) -> str:
    return (
        f"{point['step']:>6}  {number(point.get('loss_per_token')):>14}  {number(point.get('learning_rate')):>13}  "
        f"{number(point.get('grad_norm')):>13}  {point.get('tokens', 0):>8}"
    )
