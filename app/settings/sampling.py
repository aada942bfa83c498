"""What draws samples, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from app.settings.values import Count, Theme
from engines.registry import capabilities, sampler_kind
from schemas.errors import InvalidRequest


class Sampling(Theme):
    """The sampler of every base model."""

    heading = "Sampling"

    decode_slice: Count = Field(
        8,
        description="Tokens of each sequence that a turn of sampling generates at least; new samples join, and "
        "cancelled ones leave, between turns. Training and sampling get equal shares of time if both have work.",
    )
    sample_logprobs: Literal["tempered", "plain"] = Field(
        "tempered",
        description="Log-probabilities of sampled tokens: of the distribution that was drawn from (scaled by the "
        "temperature), or of the plain model at temperature 1.",
    )
    sampler: str = Field(
        "torch",
        pattern=r"^(torch|vllm|https?://[^/]+/(.*/)?v1/?)$",
        description="What draws samples. torch: the trainer's own copy of the weights. vllm: vLLM, in an environment "
        "and a process of its own, with a second copy. An address that ends in /v1: an OpenAI-compatible server that "
        "has the same base model and answers with token ids. See docs/vllm.md.",
    )
    sampler_python: Path | None = Field(
        None,
        description="Python interpreter of the environment that has vLLM. Unset: the one that "
        "`make engine-venv NAME=vllm` makes.",
    )
    sampler_memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Key-value cache of sampler vllm in GiB. Unset: 2 on a CPU; on a GPU what fits, with vLLM's copy "
        "of the weights, within 40 % of its memory.",
    )
    sampler_max_rank: Annotated[int, Field(ge=1, le=512)] = Field(
        64, description="Largest LoRA rank that sampler vllm takes; it reserves memory for it."
    )

    @field_validator("sampler")
    @classmethod
    def _engine_can_sample(cls, value: str, info: ValidationInfo) -> str:
        if "engine" in info.data:  # else that is what is refused
            try:
                capabilities(info.data["engine"]).check_sampler(sampler_kind(value))
            except InvalidRequest as error:
                raise ValueError(error.message.partition("; ")[2]) from None
        return value
