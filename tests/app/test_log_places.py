"""Where the server's log goes: a quiet terminal, a file with everything, JSON for machines, workers included."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import logging as server_log
from app.logging import LogFile, TerminalFormatter
from app.metrics.events import Events, Totals
from app.settings import Settings
from app.summary import summary
from workers.child import log_through
from workers.messages import Logged
from workers.rank_process import relog

SCRIPT = """
import logging, sys
from pathlib import Path
from app import logging as server_log

level, form, requests, file = sys.argv[1:]
server_log.configure(level, form, requests=requests == "True")
assert server_log.keep_in(Path(file)) is None
logging.getLogger("app.access").info("GET /x 200", extra={"ms": 1})
logging.getLogger("app.access").debug("GET /healthz 200")
logging.getLogger("tinsmith.runtime").warning("careful")
"""


def written(tmp_path: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """The lines on stderr and in the file."""
    file = tmp_path / "server.log"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments, str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    assert file.stat().st_mode & 0o077 == 0
    return done.stderr.splitlines(), file.read_text().splitlines()


@pytest.mark.parametrize(
    ("level", "requests", "shown", "kept"),
    [
        ("info", "False", ["careful"], ["GET /x 200 ms=1", "careful"]),
        ("info", "True", ["GET /x 200 ms=1", "careful"], ["GET /x 200 ms=1", "careful"]),
        ("debug", "False", ["GET /x 200 ms=1", "GET /healthz 200", "careful"], None),
        ("warning", "True", ["careful"], ["careful"]),
    ],
)
def test_requests_are_in_the_file_and_on_stderr_if_asked_for(
    tmp_path: Path, level: str, requests: str, shown: list[str], kept: list[str] | None
) -> None:
    terminal, file = written(tmp_path, level, "text", requests)
    assert [line.split(": ", 1)[1] for line in terminal] == shown
    assert [line.split(": ", 1)[1] for line in file] == (shown if kept is None else kept)


def test_json_is_json_in_both_places(tmp_path: Path) -> None:
    terminal, file = written(tmp_path, "info", "json", "False")
    assert [json.loads(line)["message"] for line in terminal] == ["careful"]
    assert [json.loads(line).get("ms") for line in file] == [1, None]


def record(message: str, level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("x", level, "f", 1, message, (), None)
    vars(made).update(fields)
    return made


def test_a_terminal_gets_short_lines() -> None:
    form = TerminalFormatter()
    assert re.fullmatch(r"\d\d:\d\d:\d\d hello model=m", form.format(record("hello", model="m")))
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: care\\nful", form.format(record("care\nful", logging.WARNING)))


def test_which_file_it_is(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path, "base_model": ["acme/tiny=/nowhere"]}
    assert Settings(**settings).own_log_file == tmp_path / "server.log"
    assert Settings(**settings, log_file=tmp_path / "x").own_log_file == tmp_path / "x"
    assert Settings(**settings, log_file=Path("/dev/null")).own_log_file is None
    assert Settings(**settings, database_url="postgresql://u@h/d").own_log_file is None


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[LogFile]:
    handler = LogFile(tmp_path / "server.log")
    yield handler
    handler.close()


def test_the_file_is_begun_anew_and_older_ones_are_kept(log_file: LogFile, tmp_path: Path) -> None:
    log_file.maxBytes = 20
    for number in range(8):
        log_file.emit(record(f"line {number} of a log that is longer than a file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server.log", *(f"server.log.{n}" for n in (1, 2, 3))]
    assert (tmp_path / "server.log").read_text().startswith("line 7")
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_a_full_disk_is_told_once(log_file: LogFile, capsys: pytest.CaptureFixture[str]) -> None:
    log_file.stream.close()
    log_file.stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 (the handler closes it)
    for _ in range(3):
        log_file.emit(record("lost"))
    with pytest.raises(OSError, match="No space"):
        log_file.stream.close()
    log_file.stream = None  # type: ignore[assignment]
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the log file {log_file.baseFilename} takes no lines (No space left on device); some are lost"
    ]


def test_what_a_worker_logs_is_logged_by_the_server(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Logged] = []
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers.clear()
    listener = log_through(sent.append)
    try:
        try:
            raise LookupError("gone")
        except LookupError:
            logging.getLogger("tinsmith.worker").exception("it failed for %s", "m")
    finally:
        listener.stop()
        root.handlers[:] = before
        logging.captureWarnings(False)
    (told,) = sent
    assert (told.logger, told.level, told.message) == ("tinsmith.worker", logging.ERROR, "it failed for m")
    with caplog.at_level(logging.INFO):
        relog(told)
    (made,) = caplog.records
    document = json.loads(server_log.JsonFormatter().format(made))
    assert (document["logger"], document["level"], document["message"]) == (
        "tinsmith.worker",
        "error",
        "it failed for m",
    )
    assert document["exception"].endswith("LookupError: gone")
    assert server_log.TextFormatter().format(made).endswith("LookupError: gone")
    assert made.created == told.created


def test_a_minute_is_told_if_there_was_work() -> None:
    events = Events()
    before = events.totals()
    assert before == Totals(0, {}, 0)
    for number, kind in enumerate(["optim_step", "forward_backward", "forward_backward", "sample"]):
        events.queued(str(number), kind, "acme/tiny")
        events.settled(str(number), "over_limit" if kind == "sample" else None)
    events.requests.labels("POST", "/x", "200").inc(1200)
    now = events.totals()
    assert summary(before, now) == "2 forward_backward, 1 optim_step, 1 failed; 1,200 requests"
    events.requests.labels("GET", "/healthz", "200").inc()
    assert summary(now, events.totals()) is None
