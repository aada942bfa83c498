"""Which base models this server serves, and what can be done with them now."""

from __future__ import annotations

from fastapi import APIRouter

from app.dependencies import ServicesDep
from schemas.responses import ServerCapabilitiesResponse, SupportedModel

router = APIRouter(tags=["server"])

NOTES = (
    "stable_reinforce is an objective of this server: the hosted service's formula is not public; see docs/losses.md",
    "dimuon is an optimizer of this server: the hosted service's algorithm is not public; see docs/optimizers.md",
)


@router.get("/get_server_capabilities", operation_id="get_server_capabilities")
async def get_server_capabilities(services: ServicesDep) -> ServerCapabilitiesResponse:
    """Every base model that the server was started with; the context length is known once it is loaded."""
    models = []
    for name, runtime in services.models.runtimes.items():
        usable = runtime.state != "failed"
        length = runtime.info.context_length if runtime.info is not None else None
        models.append(SupportedModel(model_name=name, max_context_length=length, trainable=usable, sampleable=usable))
    return ServerCapabilitiesResponse(supported_models=models, notes=list(NOTES))
