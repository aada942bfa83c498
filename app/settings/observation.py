"""What the server shows of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from app.settings.values import Theme, absolute


class Observation(Theme):
    """Metrics, traces and the log."""

    heading = "Metrics, traces and logs"

    metrics_public: bool = Field(
        False,
        description="Whether `/metrics` answers without a key. Off: it takes the operator's. See docs/metrics.md.",
    )
    otel_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$",
        description="Address of an OpenTelemetry collector (OTLP over HTTP, such as http://127.0.0.1:4318) that gets "
        "traces. Needs the extra `otel`. Unset: no traces. See docs/metrics.md.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level to log. With debug, stderr has a line for each request."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Log lines for people or for machines; also those of worker processes."
    )
    log_requests: bool = Field(
        False,
        description="Whether stderr, too, has a line for each request. Off: only the log file has them, and stderr has "
        "starts, ends, warnings, errors, and once a minute, if there was work, how much.",
    )
    log_file: Path | None = Field(
        None,
        json_schema_extra={"kind": "FILE"},
        description="File for the whole log, which `tinsmith logs` shows; at 50 MiB it is begun anew, and three older "
        "ones are kept. Unset: `server.log` in the data folder, but none with `database_url`, where other servers may "
        "use the folder. /dev/null: none.",
    )

    @field_validator("log_file")
    @classmethod
    def _absolute_log_file(cls, value: Path | None) -> Path | None:
        return absolute(value)
