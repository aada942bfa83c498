"""Which base models this server serves, and what can be done with them now."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version

from fastapi import APIRouter

from app.dependencies import ServicesDep
from engines.registry import capabilities
from schemas.responses import EngineCapabilities, ServerCapabilitiesResponse, SupportedModel

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
    engine = _engine(services.settings.engine)
    return ServerCapabilitiesResponse(
        supported_models=models, engine=engine, server_version=version("tinsmith"), notes=list(NOTES)
    )


def _engine(name: str) -> EngineCapabilities:
    """Where an environment is, is nobody's business but the operator's."""
    facts = asdict(capabilities(name))
    del facts["engine"], facts["environment"]
    return EngineCapabilities(name=name, **facts)
