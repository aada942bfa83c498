"""What a person can do about a refusal of the server that does not say so itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LISTS = {
    "model_id": "`tinsmith runs list` shows the training runs of your project",
    "training_run_id": "`tinsmith runs list` shows the training runs of your project",
    "path": "`tinsmith checkpoints list` shows the checkpoints of your project",
    "source_path": "`tinsmith checkpoints list` shows the checkpoints of your project",
    "tinker_path": "`tinsmith checkpoints list` shows the checkpoints of your project",
    "checkpoint_id": "`tinsmith checkpoints list` shows the checkpoints of your project",
    "key_id": "`tinsmith keys list` shows the ids of keys",
    "user_id": "`tinsmith users list` shows the users and what they are in which project",
    "project_id": "`tinsmith projects list` shows the projects",
    "base_model": "`tinsmith status` lists the base models",
    "name": "`tinsmith models list` shows the base models",
}
"""By the field that names what is not there."""
_CODES = {
    "unknown_base_model": "`tinsmith status` lists the base models",
    "over_limit": "`tinsmith limits show` has the limits and what is left of them",
    "forbidden": "use a key of a role that may, or ask an owner of the project; docs/tenancy.md has the table",
    "unavailable": "try again in a moment; `tinsmith status` says how the server is",
    "rate_limited": "try again in a moment; `tinsmith limits show` has the limits",
    "internal": "`tinsmith logs` on the server's machine shows what happened",
    "model_lost": "make a new training run from a checkpoint: `tinsmith checkpoints list`",
}
_STATUSES = {413: "send less at once", 429: "try again in a moment", 503: _CODES["unavailable"]}


def remedy(status: int, error: Mapping[str, Any], asked: str | None) -> str:
    """What to do about an error in the server's shape (`code`, `field`, `hint`).

    Args:
        asked: the words of the command that asked, if they are known.
    """
    hint = error.get("hint")
    if hint:
        return str(hint)
    code, field = str(error.get("code") or ""), str(error.get("field") or "")
    if status == 404 and field in LISTS:
        return LISTS[field]
    known = _CODES.get(code) or _STATUSES.get(status)
    if known is not None:
        return known
    if status == 400 and asked:
        return f"`{asked} --help` says what is accepted"
    return f"docs/errors.md says what to do about the code {code}" if code else "`tinsmith logs` has the server's log"
