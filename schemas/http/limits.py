"""Bodies about the limits of projects and keys."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.http.base import RequestModel, ResponseModel
from schemas.limits import SLOWEST, LimitName

MOST = 2**53
"""The largest value: every whole number up to it is exact."""
Unlimited = Literal["unlimited"]
Rate = Annotated[float, Field(ge=SLOWEST, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Amount = Annotated[int, Field(ge=0, le=MOST)]


class SetLimitsRequest(RequestModel):
    """Body of `PUT admin/projects/{project_id}/limits` and `PUT admin/keys/{key_id}/limits`. What is not named stays as
    it is; "unlimited" is no limit, whatever the server sets for every project."""

    requests_per_second: Rate | Unlimited | None = Field(None, description="Operations that may begin in a second.")
    requests_burst: Positive | Unlimited | None = Field(None, description="Operations that may begin at once.")
    training_tokens_per_second: Rate | Unlimited | None = Field(None, description="Tokens of training batches.")
    training_tokens_burst: Positive | Unlimited | None = Field(
        None, description="Tokens of training batches at once; the largest batch."
    )
    sampling_tokens_per_second: Rate | Unlimited | None = Field(None, description="Tokens of prompts and drawn ones.")
    sampling_tokens_burst: Positive | Unlimited | None = Field(None, description="Tokens of samples at once.")
    unfinished_operations: Positive | Unlimited | None = Field(
        None, description="Operations that may be queued or run at once."
    )
    live_runs: Amount | Unlimited | None = Field(None, description="Training runs that are live at once.")
    lora_rank: Positive | Unlimited | None = Field(None, description="Largest LoRA rank.")
    context_length: Positive | Unlimited | None = Field(
        None, description="Tokens of one datum, or of a prompt with max_tokens."
    )
    checkpoint_bytes: Amount | Unlimited | None = Field(None, description="Bytes of all stored checkpoints.")
    training_token_budget: Amount | Unlimited | None = Field(
        None, description="Tokens of training batches in all, counted from the time at which this is set."
    )
    sampling_token_budget: Amount | Unlimited | None = Field(
        None, description="Tokens of prompts and drawn ones in all, counted from the time at which this is set."
    )


class LimitItem(ResponseModel):
    """One limit that applies."""

    name: LimitName = Field(description="Which limit.")
    value: float | Unlimited = Field(description='"unlimited": expressly none.')
    source: Literal["key", "project", "server"] = Field(description="Where it was set; server: for every project.")
    set_at: datetime | None = Field(None, description="When it was set; a budget is counted from then on.")
    burst: float | None = Field(None, description="Of a rate: how much may be taken at once after a pause.")
    used: float | None = Field(
        None,
        description="Of a rate: taken, and not flowed in again yet. Of a budget: with what unfinished ones may use.",
    )
    remaining: float | None = Field(None, description="What is left now.")
    held: int | None = Field(None, description="Operations that wait until others have ended.")


class LimitsResponse(ResponseModel):
    """Result of `GET limits`, and of the routes that set and clear limits: what applies now."""

    project_id: str = Field(description="The project.")
    key_id: str | None = Field(None, description="The key; absent for a project.")
    limits: list[LimitItem] = Field(description="A limit of the project and one of the key apply both.")
