"""Projects of the server, their members and their keys. For its operators (`app/permissions.py`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from app.dependencies import AuthenticatorDep, PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import read_model
from app.routes.keys import Force, KeyId, listed, made, revoked, rotated, wanted
from schemas.requests import CreateKeyRequest, CreateProjectRequest, RotateKeyRequest, SetMemberRequest
from schemas.responses import (
    KeysResponse,
    MemberInfo,
    MembersResponse,
    NewKeyResponse,
    ProjectInfo,
    ProjectsResponse,
)
from store.projects import ListedProject
from store.records import MemberRecord

router = APIRouter(prefix="/admin/projects", tags=["admin"])

ProjectId = Annotated[str, Path(max_length=256, description="The project.")]
UserId = Annotated[str, Path(max_length=256, description="The user.")]


@router.get("", operation_id="admin_list_projects", response_model_exclude_none=True)
async def admin_list_projects(services: ServicesDep) -> ProjectsResponse:
    """Every project of the server."""
    return ProjectsResponse(projects=[_project(each) for each in await services.tenancy.projects()])


@router.post("", operation_id="admin_create_project", response_model_exclude_none=True)
async def admin_create_project(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> ProjectInfo:
    """Add a project. Nobody is in it until a key is made for it."""
    body = await read_model(request, settings, CreateProjectRequest)
    return _project(ListedProject(await services.tenancy.create_project(principal, body.name), 0))


@router.get("/{project_id}", operation_id="admin_get_project", response_model_exclude_none=True)
async def admin_get_project(project_id: ProjectId, services: ServicesDep) -> ProjectInfo:
    """One project."""
    return _project(await services.tenancy.project(project_id))


@router.delete("/{project_id}", operation_id="admin_archive_project", status_code=204)
async def admin_archive_project(
    project_id: ProjectId,
    principal: PrincipalDep,
    services: ServicesDep,
    authenticator: AuthenticatorDep,
    force: Annotated[bool, Query(description="Also if training runs are live: they end then.")] = False,
) -> Response:
    """Archive a project: none of its keys lets anybody in any more. Its checkpoints stay."""
    await services.tenancy.archive_project(principal, project_id, force=force)
    authenticator.forget()
    return Response(status_code=204)


@router.get("/{project_id}/keys", operation_id="admin_list_keys", response_model_exclude_none=True)
async def admin_list_keys(project_id: ProjectId, services: ServicesDep) -> KeysResponse:
    """The keys of a project, those that are over included. No key is in it."""
    return listed(await services.project_keys.listed(project_id))


@router.post("/{project_id}/keys", operation_id="admin_create_key", response_model_exclude_none=True)
async def admin_create_key(
    project_id: ProjectId, request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> NewKeyResponse:
    """Make a key for a project. It is shown this once."""
    body = await read_model(request, settings, CreateKeyRequest)
    return made(*await services.project_keys.create(principal, project_id, wanted(body)))


@router.delete("/{project_id}/keys/{key_id}", operation_id="admin_revoke_key", status_code=204)
async def admin_revoke_key(
    project_id: ProjectId,
    key_id: KeyId,
    principal: PrincipalDep,
    services: ServicesDep,
    authenticator: AuthenticatorDep,
    force: Force = False,
) -> Response:
    """End a key at once (at other servers within two seconds), and all tokens made from it."""
    return await revoked(services, authenticator, principal, project_id, key_id, force=force)


@router.post("/{project_id}/keys/{key_id}/rotate", operation_id="admin_rotate_key", response_model_exclude_none=True)
async def admin_rotate_key(
    project_id: ProjectId,
    key_id: KeyId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
    authenticator: AuthenticatorDep,
) -> NewKeyResponse:
    """Make a key with the same rights; the old one ends after the overlap. The new one is shown this once."""
    body = await read_model(request, settings, RotateKeyRequest, absent=RotateKeyRequest())
    return await rotated(services, authenticator, principal, project_id, key_id, body)


@router.get("/{project_id}/members", operation_id="admin_list_members")
async def admin_list_members(project_id: ProjectId, services: ServicesDep) -> MembersResponse:
    """Who belongs to a project."""
    return MembersResponse(members=[_member(each) for each in await services.tenancy.members(project_id)])


@router.put("/{project_id}/members/{user_id}", operation_id="admin_set_member")
async def admin_set_member(
    project_id: ProjectId,
    user_id: UserId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
    authenticator: AuthenticatorDep,
    force: Force = False,
) -> MemberInfo:
    """Add a user to a project, or change what the user is there: the user's keys can do no more from then on."""
    body = await read_model(request, settings, SetMemberRequest)
    member = await services.tenancy.set_member(principal, project_id, user_id, body.role, force=force)
    authenticator.forget()
    return _member(member)


@router.delete("/{project_id}/members/{user_id}", operation_id="admin_remove_member", status_code=204)
async def admin_remove_member(
    project_id: ProjectId,
    user_id: UserId,
    principal: PrincipalDep,
    services: ServicesDep,
    authenticator: AuthenticatorDep,
    force: Force = False,
) -> Response:
    """Take a user out of a project, and revoke the user's keys there."""
    await services.tenancy.remove_member(principal, project_id, user_id, force=force)
    authenticator.forget()
    return Response(status_code=204)


def _project(each: ListedProject) -> ProjectInfo:
    project = each.project
    return ProjectInfo(
        project_id=project.project_id,
        name=project.name,
        created_at=project.created_at,
        archived_at=project.archived_at,
        live_runs=each.live_runs,
    )


def _member(member: MemberRecord) -> MemberInfo:
    return MemberInfo(user_id=member.user.user_id, name=member.user.name, role=member.role, since=member.since)
