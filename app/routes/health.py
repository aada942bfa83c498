"""Whether the process answers (`healthz`) and whether it can take work (`readyz`). Both need no key."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.dependencies import LifecycleDep, ReadinessDep
from schemas.responses import HealthResponse, ReadyResponse

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="healthz")
async def healthz() -> HealthResponse:
    """200 as long as the process answers, whatever the workers do."""
    return HealthResponse()


@router.get(
    "/readyz",
    operation_id="readyz",
    responses={
        503: {"model": ReadyResponse, "description": "A base model does not answer, or the server is stopping."}
    },
)
async def readyz(response: Response, readiness: ReadinessDep, lifecycle: LifecycleDep) -> ReadyResponse:
    """200 only if the worker of every base model has answered just now and the server takes new work."""
    answer = await readiness.check()
    if lifecycle.draining:
        answer = answer.model_copy(update={"status": "not_ready"})
    if answer.status != "ready":
        response.status_code = 503
    return answer
