"""The credential of the caller: exchanging it for a short-lived token, showing it, revoking it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import unauthenticated
from app.dependencies import AuthenticatorDep, PrincipalDep, ServicesDep, SettingsDep, StoreDep
from app.principal import Principal
from app.routes.bodies import read_model
from app.routes.keys import Force
from schemas.errors import NotFound
from schemas.requests import AuthTokenRequest
from schemas.responses import ApiKeyDetails, ApiKeyOrganization, ApiKeyResponse, ApiKeyUser, AuthTokenResponse
from schemas.roles import PERMISSIONS
from store.database import Store
from store.keys import get_project, valid_key
from store.records import KeyRecord, ProjectRecord

router = APIRouter(prefix="/auth", tags=["account"])


@router.post("/token", operation_id="auth_token")
async def auth_token(
    request: Request, principal: PrincipalDep, store: StoreDep, services: ServicesDep, settings: SettingsDep
) -> AuthTokenResponse:
    """A token to send in place of the API key. 404 unless the server was started with `pjwt_auth_enabled`."""
    await read_model(request, settings, AuthTokenRequest, absent=AuthTokenRequest())
    if not settings.pjwt_auth_enabled:
        raise NotFound(
            "this server exchanges no tokens: send the API key itself",
            hint="its operator can switch them on with the setting pjwt_auth_enabled",
        )
    key, _ = await _credential(store, principal)
    return AuthTokenResponse(jwt=services.tokens.issue(key, until=principal.until))


@router.get("/apikey/me", operation_id="get_own_api_key")
async def get_own_api_key(principal: PrincipalDep, store: StoreDep) -> ApiKeyResponse:
    """What the key of this request is, without anything that would let its reader in."""
    key, project = await _credential(store, principal)
    return ApiKeyResponse(
        key_id=int(key.key_id[:13], 16),  # 52 bits: exact in every JSON reader
        name=key.name,
        note=f"{key.prefix}...",
        details=ApiKeyDetails(org_details=ApiKeyOrganization(name=project.name), user_details=ApiKeyUser(email="")),
        project_id=principal.project_id,
        role=principal.role,
        permissions=[each for each in PERMISSIONS if each in principal.permissions],
    )


@router.delete("/apikey/me", operation_id="delete_own_api_key", status_code=204)
async def delete_own_api_key(
    principal: PrincipalDep, services: ServicesDep, authenticator: AuthenticatorDep, force: Force = False
) -> Response:
    """Revoke the key of this request, and all tokens made from it, at once."""
    await services.project_keys.revoke(principal, principal.project_id, principal.key_id, force=force)
    authenticator.forget()
    return Response(status_code=204)


async def _credential(store: Store, principal: Principal) -> tuple[KeyRecord, ProjectRecord]:
    async def load(db: AsyncSession) -> tuple[KeyRecord | None, ProjectRecord | None]:
        return await valid_key(db, principal.key_id), await get_project(db, principal.project_id)

    key, project = await store.read(load)
    if key is None or project is None:  # revoked since the middleware looked
        raise unauthenticated()
    return key, project
