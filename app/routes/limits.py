"""Limits of projects and keys: their owner reads them, the operator sets them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import read_model
from app.services.limit_report import LimitState
from app.services.tenant_limits import Effective
from schemas.errors import InvalidRequest
from schemas.limits import UNLIMITED, LimitName
from schemas.requests import SetLimitsRequest
from schemas.responses import ErrorResponse, LimitItem, LimitsResponse

router = APIRouter(tags=["limits"])
operator = APIRouter(
    prefix="/admin",
    tags=["limits"],
    responses={403: {"model": ErrorResponse, "description": "The key is not the operator's."}},
)

ProjectId = Annotated[str, Path(max_length=256, description="The project.")]
KeyId = Annotated[str, Path(max_length=256, description="The id of the key, not the key.")]
Names = Annotated[list[LimitName] | None, Query(alias="name", description="Which limits; without it all of them.")]


@router.get("/limits", operation_id="get_limits", response_model_exclude_none=True)
async def get_limits(principal: PrincipalDep, services: ServicesDep) -> LimitsResponse:
    """The limits of the API key and its project, and what is used of them."""
    return _shown(*await services.limit_report.of_key(principal.key_id))


@operator.get("/projects/{project_id}/limits", operation_id="get_project_limits", response_model_exclude_none=True)
async def get_project_limits(project_id: ProjectId, services: ServicesDep) -> LimitsResponse:
    """The limits of a project, and what is used of them."""
    return _shown(*await services.limit_report.of_project(project_id))


@operator.put("/projects/{project_id}/limits", operation_id="set_project_limits", response_model_exclude_none=True)
async def set_project_limits(
    project_id: ProjectId, request: Request, admin: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> LimitsResponse:
    """Set limits of a project. They apply at once here, and within two seconds on other servers."""
    values = _values(await read_model(request, settings, SetLimitsRequest))
    await services.limits.set_for_project(project_id, values, by=admin.key_id)
    return _shown(*await services.limit_report.of_project(project_id))


@operator.delete("/projects/{project_id}/limits", operation_id="clear_project_limits", response_model_exclude_none=True)
async def clear_project_limits(
    project_id: ProjectId, admin: PrincipalDep, services: ServicesDep, names: Names = None
) -> LimitsResponse:
    """Forget limits of a project: the server's apply to it again."""
    await services.limits.clear_for_project(project_id, names, by=admin.key_id)
    return _shown(*await services.limit_report.of_project(project_id))


@operator.get("/keys/{key_id}/limits", operation_id="get_key_limits", response_model_exclude_none=True)
async def get_key_limits(key_id: KeyId, services: ServicesDep) -> LimitsResponse:
    """The limits of a key and its project, and what is used of them."""
    return _shown(*await services.limit_report.of_key(key_id))


@operator.put("/keys/{key_id}/limits", operation_id="set_key_limits", response_model_exclude_none=True)
async def set_key_limits(
    key_id: KeyId, request: Request, admin: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> LimitsResponse:
    """Set limits of a key, beside those of its project."""
    values = _values(await read_model(request, settings, SetLimitsRequest))
    await services.limits.set_for_key(key_id, values, by=admin.key_id)
    return _shown(*await services.limit_report.of_key(key_id))


@operator.delete("/keys/{key_id}/limits", operation_id="clear_key_limits", response_model_exclude_none=True)
async def clear_key_limits(
    key_id: KeyId, admin: PrincipalDep, services: ServicesDep, names: Names = None
) -> LimitsResponse:
    """Forget limits of a key: only those of its project apply to it."""
    await services.limits.clear_for_key(key_id, names, by=admin.key_id)
    return _shown(*await services.limit_report.of_key(key_id))


def _values(body: SetLimitsRequest) -> dict[LimitName, float | None]:
    given: dict[LimitName, float | None] = {}
    for name, value in body:
        if value is not None:
            given[name] = None if value == UNLIMITED else float(value)  # type: ignore[index]
    if not given:
        accepted = ", ".join(SetLimitsRequest.model_fields)
        raise InvalidRequest(f"the body names no limit; accepted are: {accepted}")
    return given


def _shown(effective: Effective, states: list[LimitState]) -> LimitsResponse:
    return LimitsResponse(
        project_id=effective.project_id,
        key_id=effective.key_id,
        limits=[
            LimitItem(
                name=state.name,
                value=UNLIMITED if state.value is None else state.value,
                source=state.source,
                set_at=state.set_at,
                burst=state.burst,
                used=state.used,
                remaining=state.remaining,
                held=state.held,
            )
            for state in states
        ],
    )
