"""The timeline of a session, as a file for Perfetto: its signed address for the owner, the file for its bearer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from app.codec.forward_backward import JSON
from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from schemas.errors import PayloadTooLarge
from schemas.responses import TraceExportResponse

router = APIRouter(tags=["sessions"])

files = APIRouter(tags=["sessions"])
"""Needs no key: the address is the permission."""

_EVENTS = {"type": "array", "items": {"type": "object", "additionalProperties": True}}
TRACE = {JSON: {"schema": {"type": "object", "required": ["traceEvents"], "properties": {"traceEvents": _EVENTS}}}}

SessionId = Annotated[str, Path(max_length=256, description="The session.")]


@router.get(
    "/sessions/{session_id}/trace_export", operation_id="export_session_trace", response_model_exclude_none=True
)
async def export_session_trace(
    session_id: SessionId, request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> TraceExportResponse:
    """Where to fetch the timeline of a session; the address works without a key until it expires."""
    try:
        address = await services.traces.address(principal.project_id, session_id)
    except PayloadTooLarge as error:
        return TraceExportResponse(status="failed", error=error.message)
    root = (settings.public_url or str(request.base_url)).rstrip("/")
    return TraceExportResponse(status="ready", url=f"{root}/api/v1{address}")


@files.get(
    "/files/sessions/{session_id}/trace.json",
    operation_id="download_session_trace",
    response_model=None,
    responses={200: {"content": TRACE, "description": "The trace."}},
)
async def download_session_trace(
    session_id: SessionId,
    expires: Annotated[int, Query(ge=0, le=2**53)],
    signature: Annotated[str, Query(max_length=128)],
    services: ServicesDep,
) -> Response:
    """The timeline in Chrome's Trace Event Format, which ui.perfetto.dev opens."""
    content = await services.traces.content(session_id, expires, signature)
    disposition = 'attachment; filename="trace.json"'
    return Response(content, media_type=JSON, headers={"Content-Disposition": disposition})
