"""Usage of a project: tokens, checkpoints and storage by the hour, and what is stored now."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.dependencies import PrincipalDep, ServicesDep
from app.services.tokens import user_urn
from app.services.usage import GIGABYTE, HOUR, UsageRow
from schemas.errors import NotFound
from schemas.http.base import Rfc3339
from schemas.http.billing import UsageInfo
from schemas.responses import (
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointStorageItem,
    CheckpointStorageResponse,
    CheckpointUsage,
    SamplingPrefillUsage,
    SamplingSampleUsage,
    StorageUsage,
    TrainingUsage,
)

router = APIRouter(prefix="/billing/usage", tags=["admin"])


@router.get("/events", operation_id="get_billing_usage")
async def get_billing_usage(
    principal: PrincipalDep,
    services: ServicesDep,
    starting_on: Annotated[Rfc3339, Query(description="Begin of a UTC hour, not in the future.")],
    ending_before: Annotated[Rfc3339, Query(description="Begin of a UTC hour, at most 14 days later; not included.")],
) -> BillingUsageResponse:
    """What the project of the API key used, by the hour. Up to date to the last finished operation."""
    report = await services.usage.report(principal.project_id, starting_on, ending_before)
    return BillingUsageResponse(
        data=[_shown(row, principal.project_id) for row in report.rows],
        sessions={
            session_id: BillingUsageSession(user_metadata=dict(metadata) or None)
            for session_id, metadata in report.sessions.items()
        },
    )


@router.get("/checkpoints/current", operation_id="get_current_checkpoint_storage")
async def get_current_checkpoint_storage(
    principal: PrincipalDep,
    services: ServicesDep,
    project_id: Annotated[str | None, Query(max_length=256, description="Must be the project of the API key.")] = None,
) -> CheckpointStorageResponse:
    """The checkpoints that the project of the API key has stored now, and their size."""
    if project_id is not None and project_id != principal.project_id:
        raise NotFound(f"there is no project {project_id!r} for this key", field="project_id")
    count, size = await services.usage.stored_now(principal.project_id)
    if count == 0:
        return CheckpointStorageResponse(data=[])
    item = CheckpointStorageItem(
        project_id=principal.project_id,
        org_user_urn=user_urn(principal.project_id),
        checkpoint_count=count,
        size_bytes=size,
        size_gigabytes=size / GIGABYTE,
    )
    return CheckpointStorageResponse(data=[item])


def _shown(row: UsageRow, project_id: str) -> BillingUsageEvent:
    return BillingUsageEvent(
        bucket_start=row.bucket_start,
        bucket_end=row.bucket_start + HOUR,
        base_model=row.base_model,
        user_id=user_urn(project_id),
        session_id=row.session_id,
        project_id=project_id,
        event_info=_info(row),
    )


def _info(row: UsageRow) -> UsageInfo:
    count = int(row.quantity)
    match row.kind:
        case "training":
            return TrainingUsage(token_count=count)
        case "sampling_prefill" | "sampling_prefill_cached":
            return SamplingPrefillUsage(cached=row.kind == "sampling_prefill_cached", token_count=count)
        case "sampling_sample":
            return SamplingSampleUsage(token_count=count)
        case "checkpoint":
            return CheckpointUsage(count=count)
        case "storage":
            return StorageUsage(gigabyte_hours=row.quantity)
