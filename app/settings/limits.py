"""What is refused or held back."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from app.settings.values import Count, Rate, Theme


class Limits(Theme):
    """Sizes of requests, and the limits of every project that has none of its own."""

    heading = "Limits of requests and projects"

    max_request_tokens: Count = Field(
        262_144, description="Tokens of all datums of one training request. Longer ones are refused before any work."
    )
    limit_requests_per_second: Rate | None = Field(
        None,
        description="For each project: operations (training requests, saves, loads, samples) that it may begin in a "
        "second. More are accepted, and held back. Unset: no limit. This and the next ones: docs/limits.md.",
    )
    limit_requests_burst: Count | None = Field(
        None, description="For each project: operations that may begin at once after a pause. Unset: 60 seconds' worth."
    )
    limit_training_tokens_per_second: Rate | None = Field(
        None, description="For each project: tokens of training batches in a second. Unset: no limit."
    )
    limit_training_tokens_burst: Count | None = Field(
        None,
        description="For each project: tokens of training batches that may begin at once after a pause, and the "
        "largest batch. Unset: 60 seconds' worth.",
    )
    limit_sampling_tokens_per_second: Rate | None = Field(
        None, description="For each project: tokens of prompts and of what is drawn, in a second. Unset: no limit."
    )
    limit_sampling_tokens_burst: Count | None = Field(
        None,
        description="For each project: tokens of samples that may begin at once after a pause. Unset: 60 seconds' "
        "worth.",
    )
    limit_unfinished_operations: Count | None = Field(
        None,
        description="For each project: operations that may be queued or run at once; more are accepted, and held back. "
        "Unset: no limit.",
    )
    limit_live_runs: Count | None = Field(
        None, description="For each project: training runs that are live at once. Unset: no limit but `max_adapters`."
    )
    limit_context_length: Count | None = Field(
        None, description="For each project: tokens of one datum, or of a prompt with `max_tokens`. Unset: no limit."
    )
    limit_checkpoint_bytes: Count | None = Field(
        None, description="For each project: bytes of all checkpoints that are stored. Unset: no limit."
    )
    max_custom_loss_mib: Count = Field(
        256,
        description="For each project: MiB of the custom losses that are kept. A loss goes `log_retention` after the "
        "end of its session.",
    )
    max_body_mib: Count = Field(64, description="Largest request body in MiB, before and after decompression.")
    max_import_mib: Count = Field(
        4096, description="Largest adapter in MiB that `checkpoints/import` takes; the file is streamed to the disk."
    )

    @field_validator("limit_requests_burst", "limit_training_tokens_burst", "limit_sampling_tokens_burst")
    @classmethod
    def _burst_of_a_rate(cls, value: int | None, info: ValidationInfo) -> int | None:
        rate = str(info.field_name).replace("_burst", "_per_second")
        if value is not None and info.data.get(rate, 1.0) is None:
            raise ValueError(f"it means nothing without {rate}; give that too")
        return value
