"""Puts the HTTP application together: routes, middleware, and what lives as long as it does. No logic of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app import errors, openapi, parameters, permissions
from app.auth import Authenticator, AuthMiddleware
from app.cluster import connect, on_cluster, shares_cluster
from app.error_shapes import ANTHROPIC_PREFIXES, OPENAI_PREFIXES
from app.fair_requests import FairRequests
from app.groups import local_groups
from app.lifecycle import Lifecycle
from app.metrics.events import Events, HttpEvents
from app.middleware import BodyLimit, DrainGate, HostCheck, RequestContext
from app.presence import Presence
from app.readiness import Readiness
from app.routes import (
    account,
    admin,
    admin_projects,
    admin_users,
    anthropic,
    audit,
    billing,
    capabilities,
    checkpoints,
    client,
    console,
    custom_losses,
    docs,
    exports,
    futures,
    health,
    imports,
    keys,
    limits,
    metrics,
    models,
    openai,
    queue,
    run_metrics,
    runs,
    sampling,
    sessions,
    system,
    telemetry,
    throughput,
    tokenize,
    traces,
    training,
    weights,
)
from app.security_headers import SecurityHeaders
from app.services import Services
from app.services.core import GroupFactory, RuntimePlaces
from app.services.observing import Observer
from app.settings import Settings
from app.strangers import Strangers
from schemas.errors import Unavailable
from store.database import Store
from store.dev_key import ensure_dev_key

API = "/api/v1"
RESOURCES: tuple[APIRouter, ...] = (
    client.router,
    account.router,
    keys.router,
    sessions.router,
    traces.router,
    telemetry.router,
    capabilities.router,
    throughput.router,
    system.router,
    models.router,
    training.router,
    custom_losses.router,
    weights.router,
    sampling.router,
    tokenize.router,
    futures.router,
    runs.router,
    imports.router,
    run_metrics.router,
    queue.router,
    exports.router,  # before the routes of checkpoints, whose ids hold slashes
    checkpoints.router,
    audit.router,
    admin.router,
    admin_projects.router,
    admin_users.router,
    limits.router,
    limits.operator,
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
        docs_url=None,  # FastAPI's page loads its script from elsewhere: ours is app/routes/docs.py
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        dependencies=[Depends(permissions.permit), Depends(parameters.check)],
        # Its spans would hold the query of every address, signatures of downloads too: ours are app/tracing.py.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    app.state.settings = settings
    app.state.lifecycle = lifecycle
    app.state.public_operations = permissions.PUBLIC | ({"metrics"} if settings.metrics_public else set())
    app.state.events = Events()
    app.state.tracing = None if settings.otel_endpoint is None else _tracing(settings.otel_endpoint)
    errors.install(app)
    openapi.install(app)
    for router in RESOURCES:
        app.include_router(router, prefix=API, responses=openapi.ERRORS, dependencies=[openapi.KEY])
    app.include_router(traces.files, prefix=API, responses=openapi.ERRORS)
    app.include_router(exports.files, prefix=API, responses=openapi.ERRORS)
    _include_doors(app)
    app.include_router(health.router, prefix=API)
    app.include_router(health.router, include_in_schema=False)
    app.include_router(console.router)
    app.include_router(docs.router)
    app.include_router(metrics.router)
    permissions.check_routes(app)
    parameters.install(app)
    _add_middleware(app, settings, lifecycle)
    return app


def _add_middleware(app: FastAPI, settings: Settings, lifecycle: Lifecycle) -> None:
    also_public = (metrics.PATH,) if settings.metrics_public else ()
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, import_limit=settings.max_import_bytes)
    app.add_middleware(FairRequests)
    app.add_middleware(AuthMiddleware, also_public=also_public)
    app.add_middleware(DrainGate, draining=lambda: lifecycle.draining)
    app.add_middleware(HostCheck, host=settings.host, allowed=settings.allowed_hosts)
    app.add_middleware(RequestContext)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
            allow_credentials=False,  # there are no cookies: a page needs a key of its own
        )
    app.add_middleware(Strangers, also_public=also_public)
    app.add_middleware(SecurityHeaders)
    if app.state.tracing is not None:
        from app.tracing import HttpSpans

        app.add_middleware(HttpSpans, tracing=app.state.tracing)
    app.add_middleware(HttpEvents, events=app.state.events)
    if settings.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.trusted_proxies))


def _tracing(endpoint: str) -> Observer:
    """Raises `SettingsError` if what it needs is not installed."""
    from app.tracing import open_tracing  # not without need: it takes a moment

    return open_tracing(endpoint)


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
    events: Events = app.state.events
    store.on_commit = events.committed
    places: RuntimePlaces | None = None
    if settings.ray is not None:
        _, leave = await connect(settings.ray)
        closing.push_async_callback(leave)
        places = on_cluster(settings)
    observers: list[Observer] = [events]
    if app.state.tracing is not None:
        observers.append(app.state.tracing)
        closing.push_async_callback(asyncio.to_thread, app.state.tracing.close)
    async with store.setting_up():
        app.state.dev_key = await ensure_dev_key(store, settings.data_dir)
        services = Services(settings, store, groups, places=places, alone=shares_cluster(settings), observers=observers)
    lifecycle.on_drain(services.stop)
    closing.push_async_callback(lifecycle.drain)
    await services.start()
    app.state.services = services
    app.state.readiness = Readiness(services.models.runtimes)
    app.state.presence = Presence(store, services.housekeeping.touch)
    tokens = services.tokens if settings.pjwt_auth_enabled else None
    app.state.authenticator = Authenticator(store, tokens=tokens, used=services.key_uses.note)
    # Last: from here on, requests are let in.
