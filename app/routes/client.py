"""What a client reads first: flags that tune the SDK to this server. Not responsible for acting on them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.dependencies import SettingsDep
from app.routes.bodies import read_model
from schemas.requests import ClientConfigRequest
from schemas.responses import ClientConfigResponse, ClientDynamicConfigResponse

router = APIRouter(prefix="/client", tags=["client"])

CHUNK_BYTES = 5_000_000


@router.post("/config", operation_id="client_config")
async def client_config(request: Request, settings: SettingsDep) -> ClientConfigResponse:
    """Flags that a client reads once. A chunk of training data stays well below the largest body."""
    await read_model(request, settings, ClientConfigRequest, absent=ClientConfigRequest())
    return ClientConfigResponse(
        pjwt_auth_enabled=settings.pjwt_auth_enabled,
        sample_max_concurrent_requests=settings.sample_max_concurrent_requests,
        sample_use_retrieve_futures=settings.sample_use_retrieve_futures,
        sample_join_sampling_session=settings.sample_join_sampling_session,
        custom_loss_server_side=settings.custom_loss_server_side,
        fwdbwd_max_chunk_bytes_count=min(CHUNK_BYTES, settings.max_body_bytes // 2),
    )


@router.post("/dynamic_config", operation_id="client_dynamic_config")
async def client_dynamic_config(request: Request, settings: SettingsDep) -> ClientDynamicConfigResponse:
    """Flags that a client reads again every few minutes."""
    await read_model(request, settings, ClientConfigRequest, absent=ClientConfigRequest())
    return ClientDynamicConfigResponse(sample_cancel_enabled=settings.sample_cancel_enabled)
