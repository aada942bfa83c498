"""Bodies of the audit log."""

from __future__ import annotations

from typing import Any

from pydantic import AwareDatetime, Field

from schemas.http.base import ResponseModel


class AuditLogEntry(ResponseModel):
    """One event. Fields that do not apply are left out."""

    timestamp: AwareDatetime = Field(description="When it happened.")
    event: str = Field(description="What happened, as `{resource}_{action}`.")
    event_details: dict[str, Any] = Field(
        description="What it was about and, where it is known, the key that asked for it (`key_id`)."
    )
    model_id: str | None = Field(None, description="The training run (events of checkpoints).")
    tinker_path: str | None = Field(None, description="The checkpoint (events of checkpoints).")
    purpose: str | None = Field(None, description="Not used: reading a checkpoint is no event.")


class AuditLogResponse(ResponseModel):
    """Result of `audit`."""

    entries: list[AuditLogEntry] = Field(description="The events of the day, oldest first.")
