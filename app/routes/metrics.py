"""`/metrics`, for Prometheus: with a key of role admin, or without one if the setting `metrics_public` says so
(`app/permissions.py`)."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from app.dependencies import LifecycleDep, ServicesDep, SettingsDep
from app.metrics.state import expose

PATH = "/metrics"

router = APIRouter(include_in_schema=False)


@router.get(PATH, operation_id="metrics")
async def metrics(
    request: Request,
    services: ServicesDep,
    settings: SettingsDep,
    lifecycle: LifecycleDep,
) -> Response:
    """Every metric of docs/metrics.md."""
    text = await expose(services, request.app.state.events, settings.data_dir, draining=lifecycle.draining)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)
