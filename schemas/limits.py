"""The limits that a project or a key can have: their names, and what kind of number each is.

Not responsible for their values (`store/limits.py`) or for what happens at one (`app/services`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

LimitName = Literal[
    "requests_per_second",
    "requests_burst",
    "training_tokens_per_second",
    "training_tokens_burst",
    "sampling_tokens_per_second",
    "sampling_tokens_burst",
    "unfinished_operations",
    "live_runs",
    "lora_rank",
    "context_length",
    "checkpoint_bytes",
    "training_token_budget",
    "sampling_token_budget",
]
LIMIT_NAMES: tuple[LimitName, ...] = get_args(LimitName)
BURSTS: Mapping[LimitName, LimitName] = {
    "requests_burst": "requests_per_second",
    "training_tokens_burst": "training_tokens_per_second",
    "sampling_tokens_burst": "sampling_tokens_per_second",
}
"""What a bucket holds -> what flows into it in a second. Only the latter need not be a whole number."""
SLOWEST = 1e-6
"""The smallest rate: one in eleven days."""
BURST_SECONDS = 60.0
"""Seconds of its rate that a bucket holds if nothing else is said."""
UNLIMITED: Literal["unlimited"] = "unlimited"
"""The value that says: no limit, whatever applies otherwise."""
