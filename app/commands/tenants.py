"""What the commands about projects, users and keys share: finding them by name or id, and showing lists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from app.commands.client import Server
from app.commands.output import USAGE, fail, print_json, print_table

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def find(kind: str, wanted: str, found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The project or user (`kind`) of this name or id. Ends the command if there is none."""
    for each in found:
        if wanted in (each["name"], each[f"{kind}_id"]):
            return each
    names = ", ".join(str(each["name"]) for each in found)
    first = f"there is none yet: `tinsmith {kind}s create NAME` makes one"
    raise fail(f"there is no {kind} {wanted!r}", f"there are: {names}" if names else first)


def project_id(server: Server, wanted: str) -> str:
    """The id of the project of this name or id."""
    return str(find("project", wanted, server.get("admin/projects")["projects"])["project_id"])


def user_id(server: Server, wanted: str) -> str:
    """The id of the user of this name or id."""
    return str(find("user", wanted, server.get("admin/users")["users"])["user_id"])


def seconds(text: str | None) -> int | None:
    """A length of time as people write it (90s, 15m, 12h, 30d, or plain seconds), in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,12})([smhd]?)", text)
    if match is None:
        raise fail(f"{text!r} is no length of time", "write 90s, 15m, 12h, 30d, or seconds", USAGE)
    return int(match[1]) * _UNITS[match[2] or "s"]


def show(
    kind: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, as_json: bool, empty: str
) -> None:
    """Print rows: as JSON whole, or as a table of these columns (field -> heading); `empty`: as for `print_table`."""
    if as_json:
        print_json(kind, list(rows))
    else:
        cells = [[_text(row.get(field)) for field in columns] for row in rows]
        print_table(list(columns.values()), cells, empty=empty)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ",".join(_text(each) for each in value) or "-"
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", value):
        return value[:19].replace("T", " ")
    return str(value)
