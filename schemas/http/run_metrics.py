"""Bodies of what training runs measured, and of what waits."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from schemas.errors import Category
from schemas.http.base import ResponseModel
from schemas.http.server import ModelState

RunStateName = Literal["creating", "ready", "failed", "lost", "closed"]


class MetricPoint(ResponseModel):
    """One optimizer step with the batches before it. A number is absent if it was not measured, or is not finite."""

    step: int = Field(description="Counts the optimizer steps of the run, from 1.")
    done: bool = Field(description="False for batches whose optimizer step has not come yet.")
    merged: int = Field(description="How many steps this stands for: those of a long run are merged.")
    time: datetime = Field(description="When its last result was there.")
    batches: int = Field(description="Requests of forward_backward; merged ones count once.")
    tokens: int = Field(description="Tokens of the batches.")
    loss: float | None = Field(None, description="Sum of the loss over the batches.")
    loss_per_token: float | None = Field(
        None, description="The loss divided by the weights (cross_entropy), or by the positions that count."
    )
    grad_norm: float | None = Field(None, description="2-norm of the gradient before clipping.")
    learning_rate: float | None = Field(None, description="Step size.")
    logprob_gap: float | None = Field(
        None, description="Mean of |trainer's logprob - sampler's logprob|, for losses that are given both."
    )
    kl: float | None = Field(None, description="Mean of sampler's logprob - trainer's logprob.")
    waited_seconds: float = Field(description="From the acceptance of each request to its start, added up.")
    run_seconds: float = Field(description="From the start of each request to its result, added up.")


class RunMetricsResponse(ResponseModel):
    """Result of `training_runs/{id}/metrics`."""

    training_run_id: str = Field(description="The run.")
    points: list[MetricPoint] = Field(description="In order.")


class RunMetricsSummary(ResponseModel):
    """A run in short."""

    steps: int = Field(description="Optimizer steps.")
    tokens: int = Field(description="Tokens that were trained on.")
    losses: list[float | None] = Field(
        description="Mean loss per token over equal parts of the run's batches, at most 32, in order."
    )


class WaitingOperation(ResponseModel):
    """An accepted request that has no result yet."""

    request_id: str = Field(description="The request.")
    kind: str = Field(description="What it does, as `forward_backward`.")
    training_run_id: str | None = Field(None, description="The run that it is for.")
    sampling_session_id: str | None = Field(None, description="The sampler that it is for.")
    seq_id: int | None = Field(None, description="Its number there.")
    base_model: str | None = Field(None, description="The base model; absent if another server has the request.")
    state: Literal["active", "paused_capacity", "paused_rate_limit"] = Field(description="As in `retrieve_future`.")
    running: bool = Field(description="Whether it is being computed.")
    place: int = Field(description="Its place within its run or sampler, from 1.")
    reason: str = Field(description="Why it has no result yet, in words.")
    accepted: datetime = Field(description="Since when it waits.")
    started: datetime | None = Field(None, description="Since when it runs.")
    seconds_left: float | None = Field(
        None,
        description="An estimate, from what the last requests of the same run or sampler took; absent if none of its "
        "kind, or of a kind before it, has been finished there.",
    )


class FailedOperation(ResponseModel):
    """A request that failed in the last 24 hours."""

    request_id: str = Field(description="The request.")
    kind: str = Field(description="What it should have done.")
    training_run_id: str | None = Field(None, description="The run that it was for.")
    sampling_session_id: str | None = Field(None, description="The sampler that it was for.")
    seq_id: int | None = Field(None, description="Its number there.")
    message: str = Field(description="What is wrong.")
    hint: str | None = Field(None, description="What to do.")
    code: str = Field(description="Stable name of the error.")
    category: Category = Field(description="Whose fault it is.")
    time: datetime = Field(description="When it failed.")


class QueueModel(ResponseModel):
    """What a base model has to do, of all projects together."""

    model_name: str = Field(description="The base model.")
    state: ModelState = Field(description="As in `readyz`.")
    detail: str | None = Field(None, description="Why it is not ready, if it is not.")
    training_waiting: int = Field(description="Training operations that have not begun.")
    samples_waiting: int = Field(description="Samples that have not begun.")
    tokens_per_second: float = Field(description="Of training, over the last minute.")


class QueueResponse(ResponseModel):
    """Result of `queue`."""

    waiting: list[WaitingOperation] = Field(description="The oldest first, 500 at most.")
    total: int = Field(description="How many wait in all.")
    failed: list[FailedOperation] = Field(description="Of the last 24 hours, the newest first, 50 at most.")
    models: list[QueueModel] = Field(description="Every base model.")
