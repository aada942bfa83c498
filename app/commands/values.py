"""Values of a command line that cannot be sent: numbers that JSON does not have, ids that no address can hold.

Not responsible for what typer checks by itself, nor for what only the server can know.
"""

from __future__ import annotations

import math
from urllib.parse import quote

import typer

from app.commands.output import USAGE, fail
from app.commands.remedies import LISTS

CLIMBS = ("", ".", "..")
"""Parts that an address does not keep: with one of them the request would go to another route, and be obeyed there."""


def finite(value: float | None) -> float | None:
    """The callback of an option for a number: JSON, in which it is sent, has no infinite ones and no NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def run_route(run_id: str) -> str:
    """The route of a training run. Ends the command with a usage error if this can be no id of one."""
    return f"training_runs/{_part(run_id, 'a training run', 'training_run_id', safe=':')}"


def key_part(key_id: str) -> str:
    """The id of a key as a part of an address. Ends the command with a usage error if this can be no id of one."""
    return _part(key_id, "a key", "key_id")


def model_part(name: str) -> str:
    """The name of a base model in an address, with its slashes. Ends the command if this can be no name of one."""
    for each in name.split("/"):
        _part(each, "a base model", "name", whole=name)
    return quote(name)


def _part(value: str, of: str, field: str, *, safe: str = "", whole: str | None = None) -> str:
    """`value`, quoted. `field`: what the server calls it; `whole`: what was given, if that is more than this part."""
    if value in CLIMBS:
        given = value if whole is None else whole
        raise fail(f"{given!r} cannot be {of}", LISTS[field], USAGE)
    return quote(value, safe=safe)
