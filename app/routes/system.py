"""The server itself: version, limits, and for its operator the space that is left."""

from __future__ import annotations

import asyncio
import shutil
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.settings import Settings
from schemas.http.system import DiskSpace, SystemResponse

router = APIRouter(tags=["server"])

SHOWN = (
    "ranks",
    "max_adapters",
    "max_rank",
    "max_request_tokens",
    "max_body_mib",
    "max_sample_rows",
    "max_sample_tokens",
    "max_waiting_samples",
    "sample_logprobs",
    "seq_gap_timeout",
    "session_timeout",
    "result_retention_delivered",
    "result_retention_undelivered",
    "log_retention",
    "snapshot_operations",
    "snapshot_seconds",
    "turn_timeout",
    "restart_limit",
    "death_limit",
    "shutdown_grace",
)
"""Settings that explain what a client sees. No path, address or name of a machine is among them."""


@router.get("/system", operation_id="get_system", response_model_exclude_none=True)
async def get_system(principal: PrincipalDep, services: ServicesDep, settings: SettingsDep) -> SystemResponse:
    """Version, engine and limits of the server."""
    operator = "admin" in principal.permissions
    return SystemResponse(
        version=version("tinsmith"),
        started=services.started,
        engine=settings.engine,
        sampler=settings.sampler if "/" not in settings.sampler else "another server",
        database="sqlite" if services.store.shared is None else "postgresql",
        checkpoints_in="folder" if settings.artifacts_url is None else "s3",
        settings={name: _plain(getattr(settings, name)) for name in SHOWN},
        disk=await asyncio.to_thread(_disk, settings) if operator else None,
    )


def _plain(value: Any) -> str | int | float | bool:
    return value if isinstance(value, (str, int, float)) else str(value)


def _disk(settings: Settings) -> DiskSpace | None:
    try:
        found = shutil.disk_usage(settings.data_dir)
    except OSError:
        return None
    return DiskSpace(total=found.total, free=found.free)
