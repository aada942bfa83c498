"""Keys of the caller's own project: for those who may manage them (`app/permissions.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from app.auth import Authenticator
from app.dependencies import AuthenticatorDep, PrincipalDep, ServicesDep, SettingsDep
from app.principal import Principal
from app.routes.bodies import read_model
from app.services import Services
from app.services.core import utc_now
from app.services.project_keys import NewKey
from schemas.requests import CreateKeyRequest, RotateKeyRequest
from schemas.responses import KeyInfo, KeysResponse, NewKeyResponse
from store.records import KeyRecord

router = APIRouter(prefix="/keys", tags=["keys"])

KeyId = Annotated[str, Path(max_length=256, description="The key.")]
Force = Annotated[bool, Query(description="Also if it is the last one that may manage the keys of its project.")]


@router.get("", operation_id="list_keys", response_model_exclude_none=True)
async def list_keys(principal: PrincipalDep, services: ServicesDep) -> KeysResponse:
    """The keys of the project, those that are over included. No key is in it."""
    return listed(await services.project_keys.listed(principal.project_id))


@router.post("", operation_id="create_key", response_model_exclude_none=True)
async def create_key(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> NewKeyResponse:
    """Make a key that can do no more than the one that asks, and lasts no longer. It is shown this once."""
    body = await read_model(request, settings, CreateKeyRequest)
    return made(*await services.project_keys.create(principal, principal.project_id, wanted(body)))


@router.delete("/{key_id}", operation_id="revoke_key", status_code=204)
async def revoke_key(
    key_id: KeyId,
    principal: PrincipalDep,
    services: ServicesDep,
    authenticator: AuthenticatorDep,
    force: Force = False,
) -> Response:
    """End a key at once (at other servers within two seconds), and all tokens made from it."""
    return await revoked(services, authenticator, principal, principal.project_id, key_id, force=force)


@router.post("/{key_id}/rotate", operation_id="rotate_key", response_model_exclude_none=True)
async def rotate_key(
    key_id: KeyId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
    authenticator: AuthenticatorDep,
) -> NewKeyResponse:
    """Make a key with the same rights; the old one ends after the overlap. The new one is shown this once."""
    body = await read_model(request, settings, RotateKeyRequest, absent=RotateKeyRequest())
    return await rotated(services, authenticator, principal, principal.project_id, key_id, body)


async def revoked(
    services: Services, authenticator: Authenticator, by: Principal, project_id: str, key_id: str, *, force: bool
) -> Response:
    """End a key of a project; what was remembered of it is forgotten."""
    await services.project_keys.revoke(by, project_id, key_id, force=force)
    authenticator.forget()
    return Response(status_code=204)


async def rotated(
    services: Services,
    authenticator: Authenticator,
    by: Principal,
    project_id: str,
    key_id: str,
    body: RotateKeyRequest,
) -> NewKeyResponse:
    """Put a new key in the place of one of a project; what was remembered of that is forgotten."""
    overlap, lifetime = timedelta(seconds=body.overlap), _seconds(body.expires_in)
    answer = made(*await services.project_keys.rotate(by, project_id, key_id, overlap, lifetime))
    authenticator.forget()
    return answer


def _seconds(count: int | None) -> timedelta | None:
    """A length of time, if there is one."""
    return None if count is None else timedelta(seconds=count)


def wanted(body: CreateKeyRequest) -> NewKey:
    """What a body asks for."""
    scopes = None if body.scopes is None else tuple(dict.fromkeys(body.scopes))
    return NewKey(body.name, body.role, scopes, body.user_id, _seconds(body.expires_in))


def listed(records: Sequence[KeyRecord]) -> KeysResponse:
    """Keys as a list shows them."""
    return KeysResponse(keys=[shown(record) for record in records])


def made(record: KeyRecord, plaintext: str) -> NewKeyResponse:
    """A new key as its maker sees it, once."""
    return NewKeyResponse(key=plaintext, info=shown(record))


def shown(record: KeyRecord) -> KeyInfo:
    """A key without its text."""
    ended = record.expires_at is not None and record.expires_at <= utc_now()
    return KeyInfo(
        key_id=record.key_id,
        project_id=record.project_id,
        name=record.name,
        prefix=record.prefix,
        role=record.role,
        scopes=None if record.scopes is None else list(record.scopes),
        user_id=record.user_id,
        active=record.revoked_at is None and not ended and not record.shut_out,
        created_at=record.created_at,
        last_used_at=record.last_used_at,
        expires_at=record.expires_at,
        revoked_at=record.revoked_at,
        replaced_by=record.replaced_by,
    )
