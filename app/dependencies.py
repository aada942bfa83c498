"""What routes ask for in their signatures: the tenant, the services, the settings.

Everything lives on `app.state`, put there by `app/main.py`; this module gives it types. No logic.
"""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from app.auth import Authenticator, unauthenticated
from app.lifecycle import Lifecycle
from app.presence import Presence
from app.principal import Principal
from app.readiness import Readiness
from app.services import Services
from app.settings import Settings
from store.database import Store


async def _principal(request: Request) -> Principal:
    principal = getattr(request.state, "principal", None)
    if principal is None:  # a route that asks for its tenant on a public path: deny
        raise unauthenticated()
    return cast(Principal, principal)


async def _authenticator(request: Request) -> Authenticator:
    return cast(Authenticator, request.app.state.authenticator)


async def _services(request: Request) -> Services:
    return cast(Services, request.app.state.services)


async def _settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


async def _store(request: Request) -> Store:
    return cast(Store, request.app.state.store)


async def _presence(request: Request) -> Presence:
    return cast(Presence, request.app.state.presence)


async def _readiness(request: Request) -> Readiness:
    return cast(Readiness, request.app.state.readiness)


async def _lifecycle(request: Request) -> Lifecycle:
    return cast(Lifecycle, request.app.state.lifecycle)


PrincipalDep = Annotated[Principal, Depends(_principal)]
AuthenticatorDep = Annotated[Authenticator, Depends(_authenticator)]
ServicesDep = Annotated[Services, Depends(_services)]
SettingsDep = Annotated[Settings, Depends(_settings)]
StoreDep = Annotated[Store, Depends(_store)]
PresenceDep = Annotated[Presence, Depends(_presence)]
ReadinessDep = Annotated[Readiness, Depends(_readiness)]
LifecycleDep = Annotated[Lifecycle, Depends(_lifecycle)]
