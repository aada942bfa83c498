"""What a client reads first: flags that tune the SDK to this server. Not responsible for acting on them."""

from __future__ import annotations

from fastapi import APIRouter

from app.dependencies import SettingsDep
from schemas.requests import ClientConfigRequest
from schemas.responses import ClientConfigResponse, ClientDynamicConfigResponse

router = APIRouter(prefix="/client", tags=["client"])

CHUNK_BYTES = 5_000_000


@router.post("/config", operation_id="client_config")
async def client_config(settings: SettingsDep, body: ClientConfigRequest | None = None) -> ClientConfigResponse:
    """Flags that a client reads once. A chunk of training data stays well below the largest body."""
    return ClientConfigResponse(
        sample_max_concurrent_requests=settings.sample_max_concurrent_requests,
        fwdbwd_max_chunk_bytes_count=min(CHUNK_BYTES, settings.max_body_bytes // 2),
    )


@router.post("/dynamic_config", operation_id="client_dynamic_config")
async def client_dynamic_config(body: ClientConfigRequest | None = None) -> ClientDynamicConfigResponse:
    """Flags that a client reads again every few minutes."""
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)
