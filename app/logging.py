"""How the server writes its log: one line for each record, as text for people or JSON for machines.

A file has all of them, one line for each request included; stderr has what a person wants to see. Responsible for
format, levels and places. By convention nobody logs keys or bodies. What looks like a key, token or signature, or a
value that a library quotes in its error, is blotted out here all the same: libraries do not know our convention.
"""

from __future__ import annotations

import json
import logging
import logging.config
import logging.handlers
import os
import re
import stat
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

FILE_BYTES = 50 << 20
OLDER_FILES = 3
ACCESS = "app.access"
"""The logger that has a line for each request."""
UNWRITTEN_SECONDS = 60.0
"""Between two words on stderr about a file that takes no lines."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_BLOT = "[hidden]"
_SECRETS = (
    (re.compile(r"\btml-[A-Za-z0-9_-]{8,}"), f"tml-{_BLOT}"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"), _BLOT),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._-]{8,}"), rf"\1 {_BLOT}"),
    (re.compile(r"(?i)\b((?:x-amz-)?signature|x-amz-credential|x-amz-security-token)=[^&\s'\"]+"), rf"\1={_BLOT}"),
    (re.compile(r"(?<=://)([^/\s:@]+):[^/\s@]+(?=@)"), rf"\1:{_BLOT}"),
    (
        re.compile(r"input_value=.*?, input_type="),
        f"input_value={_BLOT}, input_type=",
    ),  # pydantic quotes what it refuses
    (re.compile(r"\[parameters: .*"), f"[parameters: {_BLOT}]"),  # SQLAlchemy quotes what it stores
)
"""Keys, tokens, headers, signed addresses, passwords in addresses, and values in the errors of libraries."""
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "color_message"}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO app.serve: message key=value`. Control characters of a message are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items() if value is not None)
        line = f"{_time(record)} {record.levelname} {record.name}: " + one_line(record.getMessage() + fields)
        return blotted(line + "".join(f"\n{text}" for text in _exception(self, record)))


class TerminalFormatter(TextFormatter):
    """`12:00:00 warning: message key=value`, in local time: what a terminal shows to somebody who watches."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items() if value is not None)
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{datetime.fromtimestamp(record.created):%H:%M:%S} {level}" + one_line(record.getMessage() + fields)
        return blotted(line + "".join(f"\n{text}" for text in _exception(self, record)))


class JsonFormatter(logging.Formatter):
    """One JSON object for each record; a traceback is the value of `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        for text in _exception(self, record):
            entry["exception"] = text
        return json.dumps(
            {key: blotted(value) if isinstance(value, str) else value for key, value in entry.items()}, default=str
        )


class LogFile(logging.handlers.RotatingFileHandler):
    """A file of mode 0600 that is begun anew at `FILE_BYTES`; `OLDER_FILES` older ones are kept.

    Raises `OSError` if it cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        super().__init__(file, maxBytes=FILE_BYTES, backupCount=OLDER_FILES, encoding="utf-8")
        self._told = -UNWRITTEN_SECONDS

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """See `RotatingFileHandler`, which writes every record twice to learn its length."""
        status = os.stat(self.baseFilename) if self.stream is None else os.fstat(self.stream.fileno())
        return stat.S_ISREG(status.st_mode) and status.st_size >= self.maxBytes

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_private)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say at most once a minute that lines are lost, on stderr: the disk may be full."""
        error = sys.exc_info()[1]
        if time.monotonic() - self._told >= UNWRITTEN_SECONDS:
            self._told = time.monotonic()
            reason = getattr(error, "strerror", None) or type(error).__name__
            sys.stderr.write(f"warning: the log file {self.baseFilename} takes no lines ({reason}); some are lost\n")


class _WithoutRequests(logging.Filter):
    """Drops the lines of requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        return record.name != ACCESS


def configure(
    level: Literal["debug", "info", "warning", "error"],
    form: Literal["text", "json"],
    file: Path | None = None,
    *,
    requests: bool = False,
    trace_ids: bool = False,
) -> None:
    """Set the log of the whole process up: stderr, and `file` if it is given. Libraries' chatter is kept to warnings.

    Args:
        requests: stderr has the lines of requests, too; with the level "debug" it always has.
        trace_ids: lines say to which trace they belong.

    Raises `OSError` if the file cannot be written.
    """
    formatters = {
        "line": f"{__name__}.{'JsonFormatter' if form == 'json' else 'TextFormatter'}",
        "terminal": f"{__name__}.{'JsonFormatter' if form == 'json' else 'TerminalFormatter'}",
    }
    quiet = {"level": "WARNING" if level in ("debug", "info") else level.upper()}
    traced = ["trace"] if trace_ids else []
    shown = [*traced, *([] if requests or level == "debug" else ["requests"])]
    style = "terminal" if sys.stderr.isatty() else "line"
    handlers: dict[str, Any] = {"stderr": {"class": "logging.StreamHandler", "formatter": style, "filters": shown}}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers["file"] = {"()": LogFile, "file": file, "formatter": "line", "filters": traced}
    filters: dict[str, Any] = {"requests": {"()": _WithoutRequests}}
    if trace_ids:
        filters["trace"] = {"()": "app.tracing.TraceIds"}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {name: {"()": kind} for name, kind in formatters.items()},
            "filters": filters,
            "handlers": handlers,
            "root": {"level": level.upper(), "handlers": list(handlers)},
            "loggers": dict.fromkeys(("uvicorn", "httpx", "httpcore", "aiosqlite", "sqlalchemy", "alembic"), quiet),
        }
    )


def keep_in(file: Path) -> str | None:
    """Write the log to `file`, too, from now on; returns why that cannot be done.

    For a file in the data folder, which must be there first, and is ours alone then.
    """
    try:
        handler = LogFile(file)
    except OSError as error:
        return error.strerror or "input/output error"
    shown = logging.getLogger().handlers[0]
    form = shown.formatter if isinstance(shown.formatter, JsonFormatter) else TextFormatter()
    handler.setFormatter(form)
    for each in shown.filters:
        if not isinstance(each, _WithoutRequests):
            handler.addFilter(each)
    logging.getLogger().addHandler(handler)
    return None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def blotted(text: str) -> str:
    """`text` without what looks like a secret."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def one_line(text: str) -> str:
    """`text` with control characters escaped, so that nothing a client sends can begin a line of the log."""
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)


def _exception(form: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """The traceback of a record, if it has one; that of a worker's record is text already."""
    if record.exc_info:
        return [form.formatException(record.exc_info)]
    return [record.exc_text] if record.exc_text else []


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
