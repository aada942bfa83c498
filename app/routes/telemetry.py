"""Events that clients send about themselves. They are checked and forgotten: they may hold credentials."""

from __future__ import annotations

from fastapi import APIRouter

from schemas.requests import TelemetryRequest
from schemas.responses import TelemetryResponse

router = APIRouter(tags=["telemetry"])


@router.post("/telemetry", operation_id="telemetry")
async def telemetry(body: TelemetryRequest) -> TelemetryResponse:
    """Accepts a batch of events and stores nothing."""
    return TelemetryResponse()
