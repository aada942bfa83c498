"""A foreign `adapter_config.json`: what this server honours of it, and a refusal for all else that is on.

Not responsible for tensors (`peft_import.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest
from schemas.operations import LORA_ALPHA

FIELD = "adapter_config"

_FREE = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version",
     "exclude_modules", "megatron_core", "qalora_group_size"}
)  # fmt: skip
"""Where an adapter came from and how it was trained: its numbers do not depend on it."""
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Keys that may have these values only. Other ways to begin (pissa, olora, corda, loftq) change the base model too."""
_READ = frozenset({"r", "lora_alpha", "target_modules"})
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a configuration says about the numbers. `base_model`: what it was trained on, if it says so; `targets`: its
    `target_modules` as a list, None if they are not one (a pattern is not evaluated: the tensors say what is covered).
    """

    rank: int
    alpha: float
    base_model: str | None
    targets: Sequence[str] | None

    def check_targets(self, covered: Sequence[str]) -> None:
        """Raise `InvalidRequest` unless the listed targets mean exactly these modules, by PEFT's rule of suffixes."""
        if self.targets is None:
            return
        for name in covered:
            if not any(_means(target, name) for target in self.targets):
                raise InvalidRequest(
                    f"{FIELD}.target_modules does not name {name!r}, of which there are tensors",
                    field=f"{FIELD}.target_modules",
                )
        for target in self.targets:
            if not any(_means(target, name) for name in covered):
                raise InvalidRequest(
                    f"{FIELD}.target_modules names {target[:200]!r}, of which there are no tensors",
                    field=f"{FIELD}.target_modules",
                )


def _means(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def read_config(content: Any, *, max_rank: int) -> AdapterConfig:
    """Check a parsed `adapter_config.json`.

    Raises `InvalidRequest` naming the key for a value that this server does not compute with, and for every unknown key
    whose value is not off (null, false, 0 or empty).
    """
    if not isinstance(content, dict):
        raise InvalidRequest(f"{FIELD} is no JSON object", field=FIELD)
    for key, value in content.items():
        _check_key(str(key), value)
    for key in ("peft_type", "r", "lora_alpha"):
        if key not in content:
            raise InvalidRequest(f"{FIELD} lacks {key!r}", field=f"{FIELD}.{key}")
    rank, alpha = content["r"], content["lora_alpha"]
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise _refused("r", rank, f"a rank from 1 to {max_rank}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or not 0 < alpha <= 1e6:
        raise _refused("lora_alpha", alpha, "a number above 0, at most 1000000")
    base = content.get("base_model_name_or_path")
    if base is not None and (not isinstance(base, str) or len(base) > 4096):
        raise _refused("base_model_name_or_path", base, "a name")
    return AdapterConfig(rank, float(alpha), base or None, _targets(content.get("target_modules")))


def _check_key(key: str, value: Any) -> None:
    if key in _FIXED:
        if not any(type(value) is type(accepted) and value == accepted for accepted in _FIXED[key]):
            raise _refused(key, value, " or ".join(map(repr, _FIXED[key])))
    elif key not in _FREE and key not in _READ and not any(type(value) is type(off) and value == off for off in _OFF):
        raise _refused(key, value, "it switched off (null, false, 0 or empty), or left out")


def _refused(key: str, value: Any, accepted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{FIELD}.{key[:100]} is {repr(value)[:100]}; this server accepts {accepted}", field=f"{FIELD}.{key[:100]}"
    )


def _targets(value: Any) -> Sequence[str] | None:
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value) or len(value) > 10_000:
        raise _refused("target_modules", value, "a list of module names, or one text")
    return tuple(value)


def written_config(base_model: str, rank: int, target_modules: Sequence[str]) -> dict[str, Any]:
    """`adapter_config.json` of every adapter that is written here, in PEFT's own names.

    Args:
        target_modules: names of the linears, short where they mean exactly these by PEFT's rule of suffixes.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": target_modules,
    }
