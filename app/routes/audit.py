"""The audit log: what happened to the things of a project, a day at a time."""

from __future__ import annotations

from datetime import date
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BeforeValidator

from app.dependencies import PrincipalDep, ServicesDep
from app.services.audit import EventType
from schemas.responses import AuditLogEntry, AuditLogResponse

router = APIRouter(tags=["admin"])


def _check_day(value: object) -> object:
    if isinstance(value, str) and (len(value) != 10 or value[4] != "-" or value[7] != "-"):
        raise ValueError(f"{value[:40]!r} is not a day, as 2026-07-13 is")
    return value


@router.get("/audit", operation_id="get_audit_log", response_model_exclude_none=True)
async def get_audit_log(
    principal: PrincipalDep,
    services: ServicesDep,
    event_type: Annotated[
        EventType, Query(description="Whose events. Those of sessions, keys, users and members are in `all` only.")
    ] = "all",
    day: Annotated[date | None, BeforeValidator(_check_day), Query(description="A UTC day; default: today.")] = None,
) -> AuditLogResponse:
    """The events of one day of the project of the API key, oldest first."""
    entries = await services.audit.day(principal.project_id, event_type, day)
    return AuditLogResponse(
        entries=[
            AuditLogEntry(
                timestamp=entry.at,
                event=entry.event,
                event_details=dict(entry.details),
                model_id=entry.model_id,
                tinker_path=entry.tinker_path,
            )
            for entry in entries
        ]
    )
