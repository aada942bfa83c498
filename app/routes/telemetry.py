"""Events that clients send about themselves. They are checked and forgotten: they may hold credentials."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.dependencies import SettingsDep
from app.routes.bodies import read_model
from schemas.requests import TelemetryRequest
from schemas.responses import TelemetryResponse

router = APIRouter(tags=["telemetry"])


@router.post("/telemetry", operation_id="telemetry")
async def telemetry(request: Request, settings: SettingsDep) -> TelemetryResponse:
    """Accepts a batch of events and stores nothing."""
    await read_model(request, settings, TelemetryRequest)
    return TelemetryResponse()
