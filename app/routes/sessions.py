"""Sessions: a client program's stay, kept alive by heartbeats. Not responsible for what is trained in them."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.dependencies import PresenceDep, PrincipalDep, ServicesDep, StoreDep
from app.presence import no_such_session
from schemas.errors import NotFound
from schemas.requests import CreateSessionRequest, FinishSessionRequest, SessionHeartbeatRequest
from schemas.responses import CreateSessionResponse, SessionHeartbeatResponse, SessionResponse, SessionsResponse
from store import runs, samplers, sessions

router = APIRouter(tags=["sessions"])

SessionId = Annotated[str, Path(max_length=256, description="The session.")]
IdempotencyKey = Annotated[
    str | None,
    Header(alias="X-Idempotency-Key", max_length=256, description="The same key again gives the same session."),
]


@router.post("/create_session", operation_id="create_session")
async def create_session(
    body: CreateSessionRequest, principal: PrincipalDep, store: StoreDep, idempotency_key: IdempotencyKey = None
) -> CreateSessionResponse:
    """Begin a session. Repeat it with the same X-Idempotency-Key if the answer was lost."""
    if body.project_id is not None and body.project_id != principal.project_id:
        raise NotFound(
            f"there is no project {body.project_id!r} for this key",
            field="project_id",
            hint="leave project_id out: the API key decides",
        )
    record = await store.write(
        lambda db: sessions.create_session(
            db,
            session_id=secrets.token_hex(16),
            project_id=principal.project_id,
            tags=body.tags,
            user_metadata=body.user_metadata or {},
            sdk_version=body.sdk_version,
            display_name=body.display_name,
            idempotency_key=idempotency_key,
            now=datetime.now(UTC),
        )
    )
    return CreateSessionResponse(session_id=record.session_id)


@router.post("/session_heartbeat", operation_id="session_heartbeat")
async def session_heartbeat(
    body: SessionHeartbeatRequest, principal: PrincipalDep, presence: PresenceDep
) -> SessionHeartbeatResponse:
    """A sign of life. 410 once the session is over."""
    await presence.beat(principal.project_id, body.session_id)
    return SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", operation_id="finish_session", status_code=200)
async def finish_session(
    session_id: SessionId,
    principal: PrincipalDep,
    store: StoreDep,
    services: ServicesDep,
    presence: PresenceDep,
    body: FinishSessionRequest | None = None,
) -> Response:
    """End a session and free its adapters. The first reason wins; repeats are answered alike. The answer is empty."""
    end = body or FinishSessionRequest()
    record = await store.write(
        lambda db: sessions.finish_session(
            db, principal.project_id, session_id, end.reason.type, end.detail, datetime.now(UTC)
        )
    )
    if record is None:
        raise no_such_session(session_id)
    presence.forget(principal.project_id, session_id)
    await services.close_session(session_id)
    return Response(status_code=200)


@router.get("/sessions", operation_id="list_sessions")
async def list_sessions(
    principal: PrincipalDep,
    store: StoreDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    access_scope: Annotated[str, Query(pattern="^(owned|accessible)$")] = "owned",
) -> SessionsResponse:
    """The project's sessions, newest first."""
    page, _ = await store.read(lambda db: sessions.list_sessions(db, principal.project_id, limit, offset))
    return SessionsResponse(sessions=[record.session_id for record in page])


@router.get("/sessions/{session_id}", operation_id="get_session")
async def get_session(
    session_id: SessionId,
    principal: PrincipalDep,
    store: StoreDep,
    access_scope: Annotated[str, Query(pattern="^(owned|accessible)$")] = "owned",
) -> SessionResponse:
    """What a session created."""

    async def load(db: AsyncSession) -> SessionResponse | None:
        record = await sessions.get_session(db, principal.project_id, session_id)
        if record is None:
            return None
        return SessionResponse(
            training_run_ids=[run.model_id for run in await runs.runs_of_session(db, session_id)],
            sampler_ids=[sampler.sampler_id for sampler in await samplers.samplers_of_session(db, session_id)],
            user_metadata=dict(record.user_metadata),
            display_name=record.display_name,
        )

    found = await store.read(load)
    if found is None:
        raise no_such_session(session_id)
    return found
