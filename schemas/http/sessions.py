"""Bodies of sessions: a session is one client program, and owns the models and samplers that it creates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.http.base import Identifier, Label, RequestModel, ResponseModel, UserMetadata


class CreateSessionRequest(RequestModel):
    """Body of `create_session`. Repeating it under one X-Idempotency-Key gives the same session."""

    tags: Annotated[list[Label], Field(max_length=64)] = Field(default_factory=list, description="Free labels.")
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
