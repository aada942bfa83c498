"""Bodies of futures: what a submitted request answers at once, and what polling for its result answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.http.base import MAX_INT64, Identifier, Items, RequestModel, ResponseModel


class UntypedPromise(ResponseModel):
    """Answer of every submitted request: poll `retrieve_future` with the id."""

    request_id: str = Field(description="Identity of the future.")
    model_id: str | None = Field(None, description="The model that the request is for.")
    sample_sequence_ids: list[str] | None = Field(None, description="One id per sample, in order (`asample` only).")


class RetrieveFutureRequest(RequestModel):
    """Body of `retrieve_future`."""

    request_id: Identifier = Field(description="The future.")
    allow_metadata_only: bool = Field(False, description="A large result may be announced by its size first.")


class SamplingSessionTarget(RequestModel):
    """One client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Identifier = Field(description="The sampling session.")
    cloned_sampler_id: int = Field(
        0, ge=0, le=MAX_INT64 // 10**9, description="Which of its clients: seq_id // 1000000000 of its requests."
    )


class RetrieveFuturesRequest(RequestModel):
    """Body of `retrieve_futures`."""

    target: SamplingSessionTarget = Field(description="Whose requests.")
    prev_cursor: int = Field(
        0, ge=0, le=MAX_INT64, description="The cursor of the last answer; 0 = from the beginning."
    )
    timeout: float | None = Field(
        None, ge=0, description="Seconds to wait for a completion; absent, or more than the server waits: as it does."
    )
    retrieved_request_ids: Annotated[Items[Identifier], Field(max_length=100_000)] = Field(
        default_factory=list, description="Futures of this client whose results it has: the server drops them."
    )


class FutureFinished(ResponseModel):
    """A future that has a result."""

    state: Literal["finished"] = Field("finished", description="There is a result to fetch.")
    request_id: str = Field(description="The future.")
    response_payload_uncompressed_size: int = Field(description="Size of the result in bytes.")


class FutureFailed(ResponseModel):
    """A future that failed; `retrieve_future` tells why."""

    state: Literal["failed"] = Field("failed", description="There is an error to fetch.")
    request_id: str = Field(description="The future.")


class RetrieveFuturesResponse(ResponseModel):
    """Result of `retrieve_futures`."""

    completions: list[Annotated[FutureFinished | FutureFailed, Field(discriminator="state")]] = Field(
        description="What was completed behind the cursor, in order."
    )
    cursor: int = Field(description="What to send as prev_cursor next.")


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
