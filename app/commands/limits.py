"""`tinsmith limits`: what a key and its project may use, what they have used, and changing that."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Server, Url, connect
from app.commands.output import USAGE, fail, print_json, print_table, say
from app.commands.tenants import project_id
from app.commands.values import key_part
from schemas.limits import LIMIT_NAMES, UNLIMITED

app = typer.Typer(
    help="Limits and budgets: show those of a key, set and clear those of projects and keys.", no_args_is_help=True
)

Project = Annotated[str | None, typer.Option("--project", help="Of a project, by its name or id. For the operator.")]
Key = Annotated[
    str | None, typer.Option("--key", metavar="ID", help="Of a key, by its id (not the key). For the operator.")
]


@app.command("show")
def show_limits(
    *,
    project: Project = None,
    key: Key = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Every limit that applies: its value, where it comes from, what is used and what is left.

    Without --project and --key those of the API key that is used.
    """
    server = connect(url, api_key, data_dir)
    place = "limits" if project is None and key is None else _place(server, project, key)
    _show(server.get(place), as_json)


@app.command("set")
def set_limits(
    values: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="Such as lora_rank=16 live_runs=4.")],
    *,
    project: Project = None,
    key: Key = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Set limits of a project or a key; the value unlimited means none, whatever the server sets for every project.

    A budget that is set counts from now on.
    """
    body = dict(_value(text) for text in values)
    server = connect(url, api_key, data_dir)
    _show(server.put(_place(server, project, key), body), as_json)


@app.command("clear")
def clear_limits(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Without any: all of them.")] = None,
    *,
    project: Project = None,
    key: Key = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Forget limits of a project or a key: what the server sets for every project, or the project's, applies again."""
    for name in names or ():
        _known(name)
    server = connect(url, api_key, data_dir)
    _show(server.delete(_place(server, project, key), name=names or None), as_json)


def _place(server: Server, project: str | None, key: str | None) -> str:
    """The address of one subject's limits. Ends the command unless exactly one is named."""
    if key is not None and project is None:
        return f"admin/keys/{key_part(key)}/limits"
    if project is not None and key is None:
        return f"admin/projects/{project_id(server, project)}/limits"
    raise fail("say whose limits they are", "give either --project or --key", USAGE)


def _known(name: str) -> str:
    if name not in LIMIT_NAMES:
        raise fail(f"{name!r} is not a limit", f"there are: {', '.join(LIMIT_NAMES)}", USAGE)
    return name


def _value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise fail(f"{text!r} is not NAME=VALUE", f"write it like lora_rank=16, or lora_rank={UNLIMITED}", USAGE)
    _known(name)
    if value == UNLIMITED:
        return name, value
    try:
        number = json.loads(value.replace("_", ""))
    except ValueError:
        number = None
    infinite = isinstance(number, float) and not math.isfinite(number)  # python reads Infinity, NaN and 1e999
    if infinite or isinstance(number, bool) or not isinstance(number, int | float):
        raise fail(f"{value!r} is not a value for {name}", f"give a number, or {UNLIMITED}", USAGE)
    return name, number


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json("limits", found)
        return
    of_key = f"  key {found['key_id']}" if found.get("key_id") else ""
    say(f"project {found['project_id']}{of_key}")
    rows = []
    for item in found["limits"]:
        more = (
            f"burst {_number(item['burst'])}" if "burst" in item else f"{item['held']} held" if item.get("held") else ""
        )
        cells = (_number(item.get(name)) for name in ("used", "remaining"))
        rows.append((item["name"], _number(item["value"]), item["source"], *cells, more))
    print_table(("limit", "value", "from", "used", "left", "more"), rows)


def _number(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:,.10g}"
