"""What the project of the caller waits for, and why."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter

from app.dependencies import PrincipalDep, ServicesDep
from app.readiness import describe
from app.services.queue import Failure, Owner, Waiting
from schemas.http.run_metrics import FailedOperation, QueueModel, QueueResponse, WaitingOperation
from workers.runtime_protocol import Runtime

router = APIRouter(tags=["server"])


@router.get("/queue", operation_id="get_queue", response_model_exclude_none=True)
async def get_queue(principal: PrincipalDep, services: ServicesDep) -> QueueResponse:
    """Every unfinished request of the project: its place, why it waits, about how long; and what failed lately."""
    view = await services.queue.view(principal.project_id)
    return QueueResponse(
        waiting=[_waiting(one) for one in view.waiting],
        total=view.total,
        failed=[_failed(one) for one in view.failures],
        models=[_model(name, runtime) for name, runtime in services.models.runtimes.items()],
    )


def _owner(owner: Owner, owner_id: str) -> dict[str, Any]:
    name = {"run": "training_run_id", "sampler": "sampling_session_id", "project": None}[owner]
    return {} if name is None else {name: owner_id}


def _waiting(one: Waiting) -> WaitingOperation:
    return WaitingOperation(
        request_id=one.request_id,
        kind=one.kind,
        **_owner(one.owner, one.owner_id),
        seq_id=one.seq_id,
        base_model=one.base_model,
        state=cast(Any, one.state),
        running=one.running,
        place=one.place,
        reason=one.reason,
        accepted=one.accepted,
        started=one.started,
        seconds_left=one.seconds_left,
    )


def _failed(one: Failure) -> FailedOperation:
    return FailedOperation(
        request_id=one.request_id,
        kind=one.kind,
        **_owner(one.owner, one.owner_id),
        seq_id=one.seq_id,
        message=one.error.message,
        hint=one.error.hint,
        code=one.error.code,
        category=one.error.category,
        time=one.at,
    )


def _model(name: str, runtime: Runtime) -> QueueModel:
    load = runtime.load()
    return QueueModel(
        model_name=name,
        state=runtime.state,
        detail=describe(runtime),
        training_waiting=load.training,
        samples_waiting=load.samples,
        tokens_per_second=runtime.throughput().tokens_per_second,
    )
