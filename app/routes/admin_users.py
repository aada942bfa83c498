"""Users of the server. For its operators (`app/permissions.py`)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.dependencies import AuthenticatorDep, PrincipalDep, ServicesDep, SettingsDep
from app.routes.admin_projects import UserId
from app.routes.bodies import read_model
from app.routes.keys import Force
from app.services.tenancy import ListedUser
from schemas.requests import CreateUserRequest
from schemas.responses import UserInfo, UserMembership, UsersResponse

router = APIRouter(prefix="/admin/users", tags=["admin"])


@router.get("", operation_id="admin_list_users")
async def admin_list_users(services: ServicesDep) -> UsersResponse:
    """Every user, and what each is in which project."""
    return UsersResponse(users=[_user(each) for each in await services.tenancy.users()])


@router.post("", operation_id="admin_create_user")
async def admin_create_user(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UserInfo:
    """Add a user, who is nothing in any project yet."""
    body = await read_model(request, settings, CreateUserRequest)
    return _user(ListedUser(await services.tenancy.create_user(principal, body.name), []))


@router.delete("/{user_id}", operation_id="admin_delete_user", status_code=204)
async def admin_delete_user(
    user_id: UserId,
    principal: PrincipalDep,
    services: ServicesDep,
    authenticator: AuthenticatorDep,
    force: Force = False,
) -> Response:
    """Delete a user: the user's memberships end, and all of the user's keys."""
    await services.tenancy.delete_user(principal, user_id, force=force)
    authenticator.forget()
    return Response(status_code=204)


def _user(each: ListedUser) -> UserInfo:
    return UserInfo(
        user_id=each.user.user_id,
        name=each.user.name,
        created_at=each.user.created_at,
        projects=[UserMembership(project_id=member.project_id, role=member.role) for member in each.memberships],
    )
