"""The registry of losses as data: which inputs and which configuration keys each one takes, with defaults.

The edge validates against this table without importing torch; the formulas are in `engines/losses.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LossSignature:
    """What a loss accepts. Inputs are names of `loss_fn_inputs`; config values are floats with their defaults."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    config: Mapping[str, float] = field(default_factory=dict)
    two_dimensional: bool = False
    """Whether `target_tokens` (and with it every per-target input) may be `[N, K]`."""


_POLICY = frozenset({"target_tokens", "logprobs", "advantages"})
_CLIP_TENSORS = frozenset({"clip_low_threshold", "clip_high_threshold"})

LOSSES: Mapping[str, LossSignature] = {
    "cross_entropy": LossSignature(frozenset({"target_tokens"}), frozenset({"weights"}), two_dimensional=True),
    "importance_sampling": LossSignature(_POLICY),
    "ppo": LossSignature(_POLICY, _CLIP_TENSORS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": LossSignature(_POLICY, _CLIP_TENSORS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": LossSignature(_POLICY, frozenset(), {"beta": 0.05}),
    "gspo": LossSignature(
        _POLICY | {"sequence_ratio_mask"},
        _CLIP_TENSORS,
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
    "stable_reinforce": LossSignature(_POLICY, frozenset(), {"kl_coeff": 0.0}),
}

CUSTOM = LossSignature(frozenset({"target_tokens"}), two_dimensional=True)
"""Of `custom`: what else there is, and of which shape, the uploaded graph says."""

INTEGER_INPUTS = frozenset({"target_tokens"})
"""Inputs that are token ids (int64); every other input is float32."""
