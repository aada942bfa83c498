"""Training runs, as lists for people and programs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from app.dependencies import PrincipalDep, ServicesDep
from app.routes.checkpoints import shown
from app.services.runs import ListedRun
from schemas.errors import NotFound
from schemas.http.run_metrics import RunMetricsSummary
from schemas.responses import Cursor, TrainingRun, TrainingRunsResponse
from store.run_metrics import RunOverview

router = APIRouter(tags=["training runs"])

RunId = Annotated[str, Path(max_length=300, description="The training run.")]
Scope = Annotated[str, Query(pattern="^(owned|accessible)$", description="A key sees its own project in both.")]


@router.get("/training_runs", operation_id="list_training_runs", response_model_exclude_none=True)
async def list_training_runs(
    principal: PrincipalDep,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    access_scope: Scope = "owned",
    project_id: Annotated[str | None, Query(max_length=256)] = None,
    include_metrics: Annotated[bool, Query(description="Tell what each measured, in short.")] = False,
) -> TrainingRunsResponse:
    """The project's training runs, newest first."""
    if project_id is not None and project_id != principal.project_id:
        raise NotFound(f"there is no project {project_id!r} for this key", field="project_id")
    page, total = await services.runs.page(principal.project_id, limit, offset)
    metrics: dict[str, RunOverview] = {}
    if include_metrics:
        metrics = await services.run_metrics.overviews([listed.run.model_id for listed in page])
    return TrainingRunsResponse(
        training_runs=[_shown(listed, metrics.get(listed.run.model_id)) for listed in page],
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


@router.get("/training_runs/{training_run_id}", operation_id="get_training_run", response_model_exclude_none=True)
async def get_training_run(
    training_run_id: RunId, principal: PrincipalDep, services: ServicesDep, access_scope: Scope = "owned"
) -> TrainingRun:
    """One training run."""
    return _shown(await services.runs.single(principal.project_id, training_run_id))


def _shown(listed: ListedRun, overview: RunOverview | None = None) -> TrainingRun:
    run = listed.run
    return TrainingRun(
        training_run_id=run.model_id,
        base_model=run.base_model,
        model_owner=run.project_id,
        corrupted=run.state == "lost",
        lora_rank=None if run.lora is None else run.lora.rank,
        last_request_time=run.last_request_at,
        created_time=run.created_at,
        state=run.state,
        last_checkpoint=None if listed.training is None else shown(listed.training),
        last_sampler_checkpoint=None if listed.sampler is None else shown(listed.sampler),
        user_metadata=dict(run.user_metadata),
        metrics=None if overview is None else _summary(overview),
    )


def _summary(overview: RunOverview) -> RunMetricsSummary:
    return RunMetricsSummary(steps=overview.steps, tokens=overview.tokens, losses=list(overview.losses))
