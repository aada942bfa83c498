"""Bodies of usage. There are no prices here: every field of cost is null."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from schemas.http.base import ResponseModel


class TrainingUsage(ResponseModel):
    """Tokens of forward and forward_backward: every position of every datum."""

    type: Literal["training"] = "training"
    token_count: int = Field(description="Tokens in the hour.")


class SamplingPrefillUsage(ResponseModel):
    """Tokens of prompts, counted once for each request."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool = Field(description="Whether they came out of the prefix cache.")
    token_count: int = Field(description="Tokens in the hour.")


class SamplingSampleUsage(ResponseModel):
    """Tokens drawn."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int = Field(description="Tokens in the hour.")


class CheckpointUsage(ResponseModel):
    """Checkpoints saved, those without a name included."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int = Field(description="Checkpoints saved in the hour.")


class StorageUsage(ResponseModel):
    """Checkpoints stored: size times time. A gigabyte is 10^9 bytes."""

    type: Literal["storage"] = "storage"
    gigabyte_hours: float = Field(description="Gigabyte-hours in the hour.")
    free: bool = Field(False, description="Always false.")


UsageInfo = Annotated[
    TrainingUsage | SamplingPrefillUsage | SamplingSampleUsage | CheckpointUsage | StorageUsage,
    Field(discriminator="type"),
]


class BillingUsageEvent(ResponseModel):
    """What was used of one kind in one hour."""

    bucket_start: AwareDatetime = Field(description="Begin of the UTC hour.")
    bucket_end: AwareDatetime = Field(description="End of the hour; not in it.")
    base_model: str | None = Field(None, description="The base model.")
    user_id: str | None = Field(None, description="The user.")
    user_name: str | None = Field(None, description="Not used.")
    session_id: str | None = Field(None, description="The session; null for storage, which outlives sessions.")
    project_id: str | None = Field(None, description="The project.")
    estimated_cost_usd: float | None = Field(None, description="Not used.")
    effective_rate_usd_per_million_tokens: float | None = Field(None, description="Not used.")
    effective_rate_usd_per_gigabyte_month: float | None = Field(None, description="Not used.")
    event_info: UsageInfo = Field(description="The kind and the quantity.")


class BillingUsageSession(ResponseModel):
    """A session in the usage."""

    user_metadata: dict[str, str] | None = Field(None, description="As given at its creation.")


class BillingUsageResponse(ResponseModel):
    """Result of `billing/usage/events`."""

    data: list[BillingUsageEvent] = Field(description="By hour, then by kind, the largest quantity first.")
    sessions: dict[str, BillingUsageSession] = Field(description="Every session in `data`, by its id.")
    cost_data_through: AwareDatetime | None = Field(None, description="Not used.")


class CheckpointStorageItem(ResponseModel):
    """What a project has stored now."""

    project_id: str | None = Field(None, description="The project.")
    org_user_urn: str | None = Field(None, description="The user.")
    user_email: str | None = Field(None, description="Not used.")
    user_name: str | None = Field(None, description="Not used.")
    checkpoint_count: int = Field(description="Checkpoints, those without a name included.")
    size_bytes: int = Field(description="Their size in bytes.")
    size_gigabytes: float = Field(description="Their size in gigabytes of 10^9 bytes.")
    estimated_monthly_cost_usd: float | None = Field(None, description="Not used.")


class CheckpointStorageResponse(ResponseModel):
    """Result of `billing/usage/checkpoints/current`."""

    effective_rate_usd_per_gigabyte_month: float | None = Field(None, description="Not used.")
    data: list[CheckpointStorageItem] = Field(description="One entry, or none if nothing is stored.")
