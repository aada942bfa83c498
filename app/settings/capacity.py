"""How much one base model does at once."""

from __future__ import annotations

from pydantic import Field

from app.settings.values import Count, Theme


class Capacity(Theme):
    """Training runs and samples that one base model holds."""

    heading = "Capacity of a base model"

    max_adapters: Count = Field(
        1024,
        description="Training runs that are live at once on each base model, in memory or idle on disk; names of one "
        "folder share it.",
    )
    max_rank: Count = Field(256, description="Largest LoRA rank that a client may ask for.")
    max_sample_rows: Count = Field(64, description="Sequences that are generated at once on each base model.")
    max_sample_tokens: Count = Field(
        131_072,
        description="Tokens (prompts and what is drawn) that all sequences being generated may hold at once on each "
        "base model; the default model keeps 46 kB of memory for each in float32. Samples that do not fit wait.",
    )
    max_waiting_samples: Count = Field(
        4096,
        description="Samples of one project that may wait on each base model. Beyond it `asample` answers 429, on "
        "which clients pause and send the sample again until it is taken.",
    )
