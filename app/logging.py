"""How the server writes its log: one line for each record, as text for people or JSON for machines, to stderr.

Responsible for format and levels. Not responsible for what is logged; by convention nobody logs keys or bodies.
"""

from __future__ import annotations

import json
import logging
import logging.config
import re
from datetime import UTC, datetime
from typing import Any, Literal

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "color_message"}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO app.serve: message key=value`. Control characters of a message are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items() if value is not None)
        line = f"{_time(record)} {record.levelname} {record.name}: " + one_line(record.getMessage() + fields)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


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
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(level: Literal["debug", "info", "warning", "error"], form: Literal["text", "json"]) -> None:
    """Set the log of the whole process up. Libraries' own chatter is kept to warnings."""
    formatter = f"{__name__}.{'JsonFormatter' if form == 'json' else 'TextFormatter'}"
    quiet = {"level": "WARNING" if level in ("debug", "info") else level.upper()}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": formatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            "loggers": dict.fromkeys(("uvicorn", "httpx", "httpcore", "aiosqlite", "sqlalchemy", "alembic"), quiet),
        }
    )


def one_line(text: str) -> str:
    """`text` with control characters escaped, so that nothing a client sends can begin a line of the log."""
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
