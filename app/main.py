"""Puts the HTTP application together: routes, middleware, and what lives as long as it does. No logic of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, FastAPI

from app import errors, openapi
from app.auth import Authenticator, AuthMiddleware
from app.cluster import connect, on_cluster, shares_cluster
from app.error_shapes import ANTHROPIC_PREFIXES, OPENAI_PREFIXES
from app.groups import local_groups
from app.lifecycle import Lifecycle
from app.middleware import BodyLimit, DrainGate, HostCheck, RequestContext
from app.presence import Presence
from app.readiness import Readiness
from app.routes import (
    account,
    admin,
    anthropic,
    audit,
    billing,
    capabilities,
    checkpoints,
    client,
    custom_losses,
    exports,
    futures,
    health,
    models,
    openai,
    runs,
    sampling,
    sessions,
    telemetry,
    throughput,
    traces,
    training,
    weights,
)
from app.services import GroupFactory, RuntimePlaces, build_services
from app.settings import Settings
from schemas.errors import Unavailable
from store.database import Store
from store.dev_key import ensure_dev_key
from store.keys import authenticate

API = "/api/v1"
RESOURCES: tuple[APIRouter, ...] = (
    client.router,
    account.router,
    sessions.router,
    traces.router,
    telemetry.router,
    capabilities.router,
    throughput.router,
    models.router,
    training.router,
    custom_losses.router,
    weights.router,
    sampling.router,
    futures.router,
    runs.router,
    exports.router,  # before the routes of checkpoints, whose ids hold slashes
    checkpoints.router,
    audit.router,
    admin.router,
    billing.router,
)


def create_app(settings: Settings, *, group_factory: GroupFactory | None = None) -> FastAPI:
    """The application. Everything that opens files or starts workers happens in its lifespan, not here.

    Args:
        group_factory: makes the worker group of a base model; default: child processes as the settings say.
    """
    lifecycle = Lifecycle(settings.shutdown_grace)
    app = FastAPI(
        title="Tinsmith",
        summary="A self-hosted fine-tuning API that speaks Tinker's protocol.",
        version=version("tinsmith"),
        lifespan=_lifespan(settings, lifecycle, group_factory or local_groups(settings)),
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.settings = settings
    app.state.lifecycle = lifecycle
    errors.install(app)
    openapi.install(app)
    for router in RESOURCES:
        app.include_router(router, prefix=API, responses=openapi.ERRORS, dependencies=[openapi.KEY])
    app.include_router(traces.files, prefix=API, responses=openapi.ERRORS)
    app.include_router(exports.files, prefix=API, responses=openapi.ERRORS)
    _include_doors(app)
    app.include_router(health.router, prefix=API)
    app.include_router(health.router, include_in_schema=False)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(AuthMiddleware)
    app.add_middleware(DrainGate, draining=lambda: lifecycle.draining)
    app.add_middleware(HostCheck, host=settings.host, allowed=settings.allowed_hosts)
    app.add_middleware(RequestContext)
    return app


def _include_doors(app: FastAPI) -> None:
    """The routes for clients of other protocols. Each is described once, and also below the short /v1."""
    for router, prefixes, errors_of in (
        (anthropic.router, (*ANTHROPIC_PREFIXES, "/v1"), openapi.ANTHROPIC_ERRORS),
        (openai.router, OPENAI_PREFIXES, openapi.OPENAI_ERRORS),
    ):
        for number, prefix in enumerate(prefixes):
            app.include_router(
                router, prefix=prefix, responses=errors_of, dependencies=[openapi.KEY], include_in_schema=number == 0
            )


def _lifespan(
    settings: Settings, lifecycle: Lifecycle, groups: GroupFactory
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as closing:  # in reverse: drain, then close the store
            try:
                await _open(app, settings, lifecycle, groups, closing)
            except OSError as error:
                reason = error.strerror or "input/output error"
                app.state.startup_error = Unavailable(f"the data folder cannot be used ({reason})")
                raise
            except Exception as error:
                app.state.startup_error = error  # for the terminal: uvicorn would only show a traceback
                raise
            yield

    return lifespan


async def _open(
    app: FastAPI, settings: Settings, lifecycle: Lifecycle, groups: GroupFactory, closing: AsyncExitStack
) -> None:
    """Open the data folder and start the services; `closing` undoes what was done."""
    store = await Store.open(settings.data_dir, settings.database_url)
    closing.push_async_callback(store.close)
    app.state.store = store
    places: RuntimePlaces | None = None
    if settings.ray is not None:
        _, leave = await connect(settings.ray)
        closing.push_async_callback(leave)
        places = on_cluster(settings)
    async with store.setting_up():
        app.state.dev_key = dev_key = await ensure_dev_key(store, settings.data_dir)
        admin_key = await store.read(lambda db: authenticate(db, dev_key))
        app.state.admin_key_id = None if admin_key is None else admin_key.key_id
        services = build_services(settings, store, groups, places=places, alone=shares_cluster(settings))
    lifecycle.on_drain(services.stop)
    closing.push_async_callback(lifecycle.drain)
    await services.start()
    app.state.services = services
    app.state.readiness = Readiness(services.models.runtimes)
    app.state.presence = Presence(store, services.housekeeping.touch)
    tokens = services.tokens if settings.pjwt_auth_enabled else None
    app.state.authenticator = Authenticator(store, tokens=tokens)  # last: from here on, requests are let in
