"""What `tinsmith doctor` finds, in a form for people and one for machines. Not responsible for finding it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
_SHOWN = 10
"""Items of one check that the table shows; the JSON has all."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table: what was looked at, how it is, and each thing that is wrong."""

    name: str
    status: Status
    detail: str
    items: tuple[str, ...] = ()


def as_json(checks: Sequence[Check], **about: Any) -> dict[str, Any]:
    """The report for machines: `ok` is False if any check failed."""
    return {"ok": healthy(checks), **about, "checks": [asdict(check) for check in checks]}


def healthy(checks: Sequence[Check]) -> bool:
    """Whether no check failed. Warnings do not count."""
    return all(check.status != "fail" for check in checks)


def as_table(checks: Sequence[Check]) -> str:
    """The report for people."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
        lines += [f"{'':<{width + 8}}{item}" for item in check.items[:_SHOWN]]
        if len(check.items) > _SHOWN:
            lines.append(f"{'':<{width + 8}}and {len(check.items) - _SHOWN} more (--json lists all)")
    return "\n".join(lines)


def megabytes(count: float) -> str:
    """A size for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
