"""What routes ask for in their signatures: the tenant, the services, the settings.

Everything lives on `app.state`, put there by `app/main.py`; this module gives it types. No logic.
"""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from app.auth import Authenticator, Principal, unauthenticated
from app.lifecycle import Lifecycle
from app.presence import Presence
from app.readiness import Readiness
from app.services import Services
from app.settings import Settings
from schemas.errors import Forbidden
from store.database import Store


def _principal(request: Request) -> Principal:
    principal = getattr(request.state, "principal", None)
    if principal is None:  # a route that asks for its tenant on a public path: deny
        raise unauthenticated()
    return cast(Principal, principal)


def _authenticator(request: Request) -> Authenticator:
    return cast(Authenticator, request.app.state.authenticator)


def _services(request: Request) -> Services:
    return cast(Services, request.app.state.services)


def _settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


def _store(request: Request) -> Store:
    return cast(Store, request.app.state.store)


def _presence(request: Request) -> Presence:
    return cast(Presence, request.app.state.presence)


def _readiness(request: Request) -> Readiness:
    return cast(Readiness, request.app.state.readiness)


def _lifecycle(request: Request) -> Lifecycle:
    return cast(Lifecycle, request.app.state.lifecycle)


def _admin(request: Request) -> Principal:
    """The operator: whoever has the development key, which only the server's user can read. Everybody else is refused,
    and everybody if there is no such key."""
    principal = _principal(request)
    admin_key_id = getattr(request.app.state, "admin_key_id", None)
    if admin_key_id is None or principal.key_id != admin_key_id:
        raise Forbidden(
            "only the operator may administer the server",
            hint="use the development key, in the file dev_key of the data folder",
        )
    return principal


PrincipalDep = Annotated[Principal, Depends(_principal)]
AdminDep = Annotated[Principal, Depends(_admin)]
AuthenticatorDep = Annotated[Authenticator, Depends(_authenticator)]
ServicesDep = Annotated[Services, Depends(_services)]
SettingsDep = Annotated[Settings, Depends(_settings)]
StoreDep = Annotated[Store, Depends(_store)]
PresenceDep = Annotated[Presence, Depends(_presence)]
ReadinessDep = Annotated[Readiness, Depends(_readiness)]
LifecycleDep = Annotated[Lifecycle, Depends(_lifecycle)]
