"""Bodies of futures: what a submitted request answers at once, and what polling for its result answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.http.base import Identifier, RequestModel, ResponseModel


class UntypedPromise(ResponseModel):
    """Answer of every submitted request: poll `retrieve_future` with the id."""

    request_id: str = Field(description="Identity of the future.")
    model_id: str | None = Field(None, description="The model that the request is for.")
    sample_sequence_ids: list[str] | None = Field(None, description="One id per sample, in order (`asample` only).")


class RetrieveFutureRequest(RequestModel):
    """Body of `retrieve_future`."""

    request_id: Identifier = Field(description="The future.")
    allow_metadata_only: bool = Field(False, description="A large result may be announced by its size first.")


class CancelFutureRequest(RequestModel):
    """Body of `cancel_future`."""

    request_id: Identifier = Field(description="The future that nobody wants any more.")


QueueStateName = Literal["active", "paused_capacity", "paused_rate_limit"]


class TryAgain(ResponseModel):
    """408: not done yet, ask again at once (the server holds each poll for a while)."""

    type: Literal["try_again"] = "try_again"
    request_id: str = Field(description="The future.")
    queue_state: QueueStateName = Field("active", description="Whether work goes on, or waits for capacity.")
    queue_state_reason: str | None = Field(None, description="What it waits for.")


class CompleteMetadata(ResponseModel):
    """200: done; ask again with `allow_metadata_only: false` for the result itself."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int = Field(description="Size of the result in bytes.")


class FailedFuture(ResponseModel):
    """200: the work failed. `error` is there in no other result: clients recognise a failure by it."""

    error: str = Field(description="What went wrong.")
    category: Literal["user", "server", "unknown"] = Field(description="Whose fault it is.")
    code: str | None = Field(None, description="A stable identifier of the kind of error.")
    field: str | None = Field(None, description="The request field at fault, dotted.")
    hint: str | None = Field(None, description="What to do next.")
    request_id: str | None = Field(None, description="The future.")
