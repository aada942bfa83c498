"""Sessions: a client program's stay, kept alive by heartbeats. Not responsible for what is trained in them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, get_args

from fastapi import APIRouter, Header, Path, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.dependencies import PresenceDep, PrincipalDep, ServicesDep, SettingsDep, StoreDep
from app.presence import no_such_session
from app.principal import Principal
from app.routes.bodies import read_model
from app.services.tokens import user_urn
from schemas.errors import NotFound
from schemas.http.sessions import FinishedStatusQuery, FinishReasonType, StatusQuery, UserOwner
from schemas.requests import (
    CreateSessionRequest,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionSearchRequest,
    SetSessionProjectRequest,
)
from schemas.responses import (
    ActiveStatus,
    ClientFinishedStatus,
    CreateSessionResponse,
    FinishReasonResult,
    SessionHeartbeatResponse,
    SessionResponse,
    SessionSearchPosition,
    SessionSearchResponse,
    SessionsResponse,
    SessionSummary,
)
from store import runs, samplers, sessions
from store.records import SessionRecord, SessionState, SessionSummaryRecord

router = APIRouter(tags=["sessions"])

SECONDS_FOR_LAST_POLLS = 0.1
"""A program that closes right after a sample has its last poll, which only says what it got, on its way beside
the request that ends the session. The SDK cancels that poll once the session has ended, and on Python 3.11
`asyncio.wait_for` loses a cancellation that meets an answer: the SDK then waits for ever. The pause avoids that."""

SessionId = Annotated[str, Path(max_length=256, description="The session.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="X-Idempotency-Key",
        min_length=1,
        max_length=256,
        description="The same key again gives the same session.",
    ),
]


@router.post("/create_session", operation_id="create_session")
async def create_session(
    request: Request,
    principal: PrincipalDep,
    store: StoreDep,
    settings: SettingsDep,
    idempotency_key: IdempotencyKey = None,
) -> CreateSessionResponse:
    """Begin a session. Repeat it with the same X-Idempotency-Key if the answer was lost."""
    body = await read_model(request, settings, CreateSessionRequest)
    if body.project_id is not None:
        _require_project(principal, body.project_id, "project_id")
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
            by=principal.key_id,
        )
    )
    root = (settings.public_url or str(request.base_url)).rstrip("/")
    where = f"{root}/console/#/sessions/{record.session_id}"
    return CreateSessionResponse(session_id=record.session_id, info_message=f"watch this session at {where}")


@router.post("/session_heartbeat", operation_id="session_heartbeat")
async def session_heartbeat(
    request: Request, principal: PrincipalDep, presence: PresenceDep, settings: SettingsDep
) -> SessionHeartbeatResponse:
    """A sign of life. 410 once the session is over."""
    body = await read_model(request, settings, SessionHeartbeatRequest)
    await presence.beat(principal.project_id, body.session_id)
    return SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", operation_id="finish_session", status_code=200, response_class=Response)
async def finish_session(
    session_id: SessionId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    presence: PresenceDep,
    settings: SettingsDep,
) -> Response:
    """End a session and free its adapters. The first reason wins; repeats are answered alike. The answer is empty."""
    end = await read_model(request, settings, FinishSessionRequest, absent=FinishSessionRequest())
    await asyncio.sleep(SECONDS_FOR_LAST_POLLS)
    record = await services.runs.finish_session(
        principal.project_id, session_id, end.reason.type, end.detail, by=principal.key_id
    )
    if record is None:
        raise no_such_session(session_id)
    presence.forget(principal.project_id, session_id)
    return Response(status_code=200)


@router.post("/sessions/search", operation_id="search_sessions", response_model_exclude_none=True)
async def search_sessions(
    request: Request, principal: PrincipalDep, store: StoreDep, settings: SettingsDep
) -> SessionSearchResponse:
    """Sessions by name, metadata and status, newest first."""
    body = await read_model(request, settings, SessionSearchRequest)
    for project_id in body.project_ids or ():
        _require_project(principal, project_id, "project_ids")
    owner = user_urn(principal.project_id)
    if body.project_ids == [] or (isinstance(body.owner, UserOwner) and owner not in body.owner.owner_urns):
        return SessionSearchResponse(sessions=[])
    cursor = body.cursor
    found = await store.read(
        lambda db: sessions.search_sessions(
            db,
            principal.project_id,
            session_id=body.session_id,
            words=(body.display_name or "").split(),
            user_metadata=body.user_metadata,
            statuses=None if body.statuses is None else _statuses(body.statuses),
            after=None if cursor is None else (cursor.last_created_at, cursor.last_session_id),
            limit=body.limit + 1,
        )
    )
    page = found[: body.limit]
    last = page[-1].session if len(found) > len(page) else None
    return SessionSearchResponse(
        sessions=[_summary(each, owner) for each in page],
        next_cursor=None
        if last is None
        else SessionSearchPosition(last_created_at=last.created_at, last_session_id=last.session_id),
    )


@router.put("/sessions/{session_id}/project", operation_id="set_session_project", status_code=204)
async def set_session_project(
    session_id: SessionId, request: Request, principal: PrincipalDep, store: StoreDep, settings: SettingsDep
) -> Response:
    """Put a session into a project that the API key may use: its own, in which every session of the key is already."""
    body = await read_model(request, settings, SetSessionProjectRequest)
    if await store.read(lambda db: sessions.get_session(db, principal.project_id, session_id)) is None:
        raise no_such_session(session_id)
    _require_project(principal, body.project_id, "project_id")
    return Response(status_code=204)


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


def _require_project(principal: Principal, project_id: str, field: str) -> None:
    """Raise `NotFound` unless the API key may use this project: only its own."""
    if project_id != principal.project_id:
        raise NotFound(
            f"there is no project {project_id[:200]!r} for this key",
            field=field,
            hint="leave it out: the API key decides",
        )


def _statuses(queries: Sequence[StatusQuery | FinishedStatusQuery]) -> list[tuple[SessionState, str | None]]:
    """The states of the store that any of these match. Nothing here cancels or fails a session."""
    wanted: list[tuple[SessionState, str | None]] = []
    for query in queries:
        if isinstance(query, FinishedStatusQuery):
            wanted.extend(("finished", reason) for reason in query.reasons or (None,))
        elif query.type == "active":
            wanted.append(("active", None))
    return wanted


def _summary(found: SessionSummaryRecord, owner: str) -> SessionSummary:
    session = found.session
    return SessionSummary(
        session_id=session.session_id,
        created_at=session.created_at,
        owner=owner,
        project_id=session.project_id,
        status=_status(session),
        checkpoints_count=found.checkpoints_count,
        display_name=session.display_name,
        user_metadata=dict(session.user_metadata) or None,
        checkpoint_storage_bytes=found.checkpoint_storage_bytes,
    )


def _status(session: SessionRecord) -> ActiveStatus | ClientFinishedStatus | None:
    if session.state == "active":
        return ActiveStatus()
    if session.state == "expired":
        return None
    reason = next(each for each in get_args(FinishReasonType) if each == session.finish_reason)
    return ClientFinishedStatus(reason=FinishReasonResult(type=reason), detail=session.finish_detail)
