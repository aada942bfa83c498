"""Checkpoints, as lists; deleting them, setting when they expire and who may read them.

A checkpoint id on the wire is `weights/{name}`: it holds a slash, unescaped.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import read_model
from app.services.checkpoints import path_of
from app.services.paths import parse_checkpoint_id
from schemas.requests import SetTtlRequest
from schemas.responses import Checkpoint, CheckpointsResponse, Cursor
from store.records import CheckpointRecord

router = APIRouter(tags=["checkpoints"])

RunId = Annotated[str, Path(max_length=300, description="The training run.")]
CheckpointId = Annotated[
    str, Path(max_length=200, description="`weights/{name}`, `sampler_weights/{name}` or `external_weights/{name}`.")
]
Segment = Annotated[str, Path(max_length=64, description="`weights`, `sampler_weights` or `external_weights`.")]
Name = Annotated[str, Path(max_length=128, description="The name of the checkpoint.")]

PUBLISH = "/training_runs/{training_run_id}/checkpoints/{segment}/{name}/publish"
"""In parts, unlike the other routes: deleting a checkpoint that is called `publish` must not be taken for it."""


@router.get("/checkpoints", operation_id="list_checkpoints", response_model_exclude_none=True)
async def list_checkpoints(
    principal: PrincipalDep,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> CheckpointsResponse:
    """The project's checkpoints, newest first."""
    page, total = await services.checkpoints.page(principal.project_id, None, limit, offset)
    return CheckpointsResponse(
        checkpoints=[shown(record) for record in page],
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


@router.get(
    "/training_runs/{training_run_id}/checkpoints",
    operation_id="list_run_checkpoints",
    response_model_exclude_none=True,
)
async def list_run_checkpoints(
    training_run_id: RunId, principal: PrincipalDep, services: ServicesDep
) -> CheckpointsResponse:
    """All checkpoints of one training run, newest first."""
    run = await services.runs.owned(principal.project_id, training_run_id, field="training_run_id")
    page, _ = await services.checkpoints.page(principal.project_id, run.model_id, None, 0)
    return CheckpointsResponse(checkpoints=[shown(record) for record in page])


@router.put(
    "/training_runs/{training_run_id}/checkpoints/{checkpoint_id:path}/ttl",
    operation_id="set_checkpoint_ttl",
    status_code=204,
)
async def set_checkpoint_ttl(
    training_run_id: RunId,
    checkpoint_id: CheckpointId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
) -> Response:
    """Let a checkpoint expire so many seconds from now, or never."""
    body = await read_model(request, settings, SetTtlRequest)
    path = parse_checkpoint_id(training_run_id, checkpoint_id)
    await services.checkpoints.set_expiry(principal.project_id, path, body.ttl_seconds, by=principal.key_id)
    return Response(status_code=204)


@router.post(PUBLISH, operation_id="publish_checkpoint", status_code=204)
async def publish_checkpoint(
    training_run_id: RunId, segment: Segment, name: Name, principal: PrincipalDep, services: ServicesDep
) -> Response:
    """Let every project load, sample and ask about a checkpoint by its path. Nothing changes if they can already."""
    path = parse_checkpoint_id(training_run_id, f"{segment}/{name}")
    await services.checkpoints.set_public(principal.project_id, path, True, by=principal.key_id)
    return Response(status_code=204)


@router.delete(PUBLISH, operation_id="unpublish_checkpoint", status_code=204)
async def unpublish_checkpoint(
    training_run_id: RunId, segment: Segment, name: Name, principal: PrincipalDep, services: ServicesDep
) -> Response:
    """Keep a checkpoint to its own project again. Models that others made from it meanwhile stay theirs."""
    path = parse_checkpoint_id(training_run_id, f"{segment}/{name}")
    await services.checkpoints.set_public(principal.project_id, path, False, by=principal.key_id)
    return Response(status_code=204)


@router.delete(
    "/training_runs/{training_run_id}/checkpoints/{checkpoint_id:path}",
    operation_id="delete_checkpoint",
    status_code=204,
)
async def delete_checkpoint(
    training_run_id: RunId, checkpoint_id: CheckpointId, principal: PrincipalDep, services: ServicesDep
) -> Response:
    """Delete a checkpoint and its files. Samplers that use it answer 404 from then on."""
    path = parse_checkpoint_id(training_run_id, checkpoint_id)
    await services.checkpoints.delete(principal.project_id, path, by=principal.key_id)
    return Response(status_code=204)


def shown(record: CheckpointRecord) -> Checkpoint:
    """A named checkpoint as lists show it."""
    path = path_of(record)
    return Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=record.kind,
        time=record.created_at,
        tinker_path=str(path),
        size_bytes=record.size_bytes,
        public=record.public,
        user_metadata=dict(record.user_metadata) or None,
        expires_at=record.expires_at,
    )
