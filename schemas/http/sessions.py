"""Bodies of sessions: a session is one client program, and owns the models and samplers that it creates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from schemas.http.base import Identifier, Items, Label, RequestModel, ResponseModel, Rfc3339, UserMetadata


class CreateSessionRequest(RequestModel):
    """Body of `create_session`. Repeating it under one X-Idempotency-Key gives the same session."""

    tags: Annotated[Items[Label], Field(max_length=64)] = Field(default_factory=list, description="Free labels.")
    user_metadata: UserMetadata | None = Field(default_factory=dict, description="Free pairs of text.")
    sdk_version: Label | None = Field(None, description="Version of the client.")
    project_id: Identifier | None = Field(None, description="Must be the project of the API key, if it is given.")
    display_name: Label | None = Field(None, description="A name for people; need not be unique.")
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(ResponseModel):
    """Result of `create_session`. Messages are logged by the SDK at their level."""

    session_id: str = Field(description="Identity of the session.")
    info_message: str | None = Field(None, description="Something to tell the user.")
    warning_message: str | None = Field(None, description="Something to warn the user of.")
    error_message: str | None = Field(None, description="Something that is wrong, though the session exists.")
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(RequestModel):
    """Body of `session_heartbeat`."""

    session_id: Identifier = Field(description="The session that is alive.")
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(ResponseModel):
    """Result of `session_heartbeat`."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


FinishReasonType = Literal["success", "errored", "interrupted"]


class FinishReason(RequestModel):
    """Why a session is over."""

    type: FinishReasonType = Field(description="How the program ended.")


class FinishSessionRequest(RequestModel):
    """Body of `sessions/{id}/finish`. The first reason wins."""

    reason: FinishReason = Field(
        default_factory=lambda: FinishReason(type="success"), description="How the program ended."
    )
    detail: Annotated[str, Field(max_length=4096)] | None = Field(None, description="Free text about the end.")


class SessionResponse(ResponseModel):
    """Result of `sessions/{id}`."""

    training_run_ids: list[str] = Field(description="The models that the session created.")
    sampler_ids: list[str] = Field(description="The sampling sessions that it created.")
    user_metadata: dict[str, str] | None = Field(None, description="As given at creation.")
    display_name: str | None = Field(None, description="As given at creation.")


class SessionsResponse(ResponseModel):
    """Result of `sessions`."""

    sessions: list[str] = Field(description="Session ids, newest first.")


class OwnOwner(RequestModel):
    """The caller's own sessions."""

    type: Literal["own"] = "own"


class AccessibleOwner(RequestModel):
    """Every session that the caller may see: those of its project."""

    type: Literal["accessible"] = "accessible"


class UserOwner(RequestModel):
    """Sessions of these users."""

    type: Literal["user"]
    owner_urns: Annotated[Items[str], Field(min_length=1, max_length=10)] = Field(
        description="As in the `owner` of a result."
    )


class StatusQuery(RequestModel):
    """A status without details. No session here is ever `cancelled` or `failed`: these match nothing."""

    type: Literal["active", "cancelled", "failed"]


class FinishedStatusQuery(RequestModel):
    """Sessions whose client said that it was done."""

    type: Literal["client_finished"]
    reasons: Annotated[Items[FinishReasonType], Field(min_length=1, max_length=3)] | None = Field(
        None, description="How the program ended; null matches every way."
    )


class SessionSearchCursor(RequestModel):
    """Where a page of a search begins: what the page before gave as `next_cursor`."""

    last_created_at: Rfc3339 = Field(description="Creation of the last session of the page before.")
    last_session_id: str = Field(max_length=256, description="The last session of the page before.")


class SessionSearchRequest(RequestModel):
    """Body of `sessions/search`. Conditions hold together, but a session that matches `session_id` need not match
    `display_name`, and the other way round."""

    session_id: Annotated[str, Field(max_length=256)] | None = Field(None, description="Exactly this session.")
    project_ids: Annotated[Items[str], Field(max_length=100)] | None = Field(
        None, description="Only sessions of these projects. Each must be the project of the API key."
    )
    user_metadata: UserMetadata = Field(default_factory=dict, description="Pairs that the session must have.")
    display_name: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Words that the name must hold, each somewhere; ASCII letters match in either case."
    )
    owner: Annotated[OwnOwner | AccessibleOwner | UserOwner, Field(discriminator="type")] = Field(
        default_factory=OwnOwner, description="Whose sessions."
    )
    statuses: (
        Annotated[
            Items[Annotated[StatusQuery | FinishedStatusQuery, Field(discriminator="type")]],
            Field(min_length=1, max_length=20),
        ]
        | None
    ) = Field(None, description="Any of these; null matches every status.")
    limit: Annotated[int, Field(ge=1, le=200)] = Field(50, description="Most sessions in the answer.")
    cursor: SessionSearchCursor | None = Field(None, description="Null: the first page.")


class ActiveStatus(ResponseModel):
    """The session is going on."""

    type: Literal["active"] = "active"


class FinishReasonResult(ResponseModel):
    """Why a session is over."""

    type: FinishReasonType = Field(description="How the program ended.")


class ClientFinishedStatus(ResponseModel):
    """The client said that it was done."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReasonResult = Field(description="How the program ended.")
    detail: str | None = Field(None, description="What the client said about it.")


class SessionSummary(ResponseModel):
    """A session that was found."""

    session_id: str = Field(description="Identity of the session.")
    created_at: AwareDatetime = Field(description="When it began.")
    owner: str = Field(description="The user, as `tml:user:{project}`.")
    project_id: str = Field(description="The project.")
    status: Annotated[ActiveStatus | ClientFinishedStatus, Field(discriminator="type")] | None = Field(
        None, description="Absent if the session fell silent and was ended by the server."
    )
    checkpoints_count: int = Field(description="Named checkpoints of its training runs.")
    display_name: str | None = Field(None, description="As given at creation.")
    user_metadata: dict[str, str] | None = Field(None, description="As given at creation.")
    checkpoint_storage_bytes: int | None = Field(None, description="Size of these checkpoints in bytes.")


class SessionSearchPosition(ResponseModel):
    """Where the next page begins: give it back as `cursor`."""

    last_created_at: AwareDatetime = Field(description="Creation of the last session of this page.")
    last_session_id: str = Field(description="The last session of this page.")


class SessionSearchResponse(ResponseModel):
    """Result of `sessions/search`, newest first."""

    sessions: list[SessionSummary] = Field(description="This page.")
    next_cursor: SessionSearchPosition | None = Field(None, description="Absent on the last page.")


class SetSessionProjectRequest(RequestModel):
    """Body of PUT `sessions/{id}/project`."""

    project_id: Identifier = Field(description="A project that the API key may use.")


class TraceExportResponse(ResponseModel):
    """Result of `sessions/{id}/trace_export`."""

    status: Literal["pending", "ready", "failed"] = Field(description="Never `pending`: the file is made when fetched.")
    url: str | None = Field(None, description="Where to fetch the file without a key, for about an hour.")
    error: str | None = Field(None, description="Why there is none.")
