"""`tinsmith keys`: the API keys of a project of a running server.

Without --project the keys of the project of the key that asks; with it those of any project, for operators.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Server, Url, connect
from app.commands.output import print_json, say
from app.commands.tenants import find, project_id, seconds, show
from app.commands.values import key_part

app = typer.Typer(
    help="API keys: list, create, revoke, rotate. For owners of a project, and for operators.", no_args_is_help=True
)

Project = Annotated[
    str | None, typer.Option("--project", help="Name or id of a project; without it the one of the API key.")
]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="As `keys list` shows it.")]
Lifetime = Annotated[
    str | None, typer.Option("--expires-in", metavar="TIME", help="When it ends: 90s, 15m, 12h, 30d, or seconds.")
]
COLUMNS = {
    "key_id": "id",
    "name": "name",
    "prefix": "prefix",
    "role": "role",
    "scopes": "scopes",
    "state": "state",
    "last_used_at": "last used",
    "expires_at": "expires",
}


@app.command("list")
def list_keys(
    *,
    project: Project = None,
    every: Annotated[bool, typer.Option("--all", help="Also those that were revoked or have expired.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """The keys of a project. No list shows a key itself: only its id and first characters."""
    server = connect(url, api_key, data_dir)
    keys = server.get(_address(server, project))["keys"]
    shown = [{**key, "state": _state(key)} for key in keys if every or key["active"]]
    none = "no key lets anybody in: --all shows those that are over"
    empty = none if keys else "no keys yet: `tinsmith keys create NAME` makes one"
    show("keys", shown, COLUMNS, as_json=as_json, empty=empty)


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For people, to tell keys apart.")],
    *,
    project: Project = None,
    role: Annotated[str, typer.Option(help="What it may do: read-only, member, owner or admin.")] = "member",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="A permission that it is narrowed to (read, train, sample, checkpoints, keys, admin); repeatable."
        ),
    ] = None,
    user: Annotated[str | None, typer.Option(help="Name or id of the member whose key it is.")] = None,
    expires_in: Lifetime = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Make a key and print it, alone on stdout. It cannot be shown again."""
    server = connect(url, api_key, data_dir)
    wanted = {
        "name": name,
        "role": role,
        "scopes": scope or None,
        "user_id": None if user is None else _member(server, project, user),
        "expires_in": seconds(expires_in),
    }
    _tell(server.post(_address(server, project), wanted), as_json=as_json)


@app.command("revoke")
def revoke_key(
    key_id: KeyId,
    *,
    project: Project = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is the last one that may manage the keys of its project.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """End a key, and all tokens made from it: at once, at other servers of the same database within two seconds."""
    part, server = key_part(key_id), connect(url, api_key, data_dir)
    server.delete(f"{_address(server, project)}/{part}", force=force or None)
    say(f"{key_id}  revoked")


@app.command("rotate")
def rotate_key(
    key_id: KeyId,
    *,
    project: Project = None,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old key still works: 90s, 15m, 12h, 30d, or seconds.")
    ] = "1h",
    expires_in: Lifetime = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Make a key with the same rights and print it, alone on stdout; the old one ends after the overlap."""
    part, server = key_part(key_id), connect(url, api_key, data_dir)
    body = {"overlap": seconds(overlap), "expires_in": seconds(expires_in)}
    made = server.post(f"{_address(server, project)}/{part}/rotate", body)
    _tell(made, as_json=as_json)


def _address(server: Server, project: str | None) -> str:
    return "keys" if project is None else f"admin/projects/{project_id(server, project)}/keys"


def _member(server: Server, project: str | None, wanted: str) -> str:
    """The id of a member. Without a project given, and so without the right to list its members, it must be the id."""
    if project is None:
        return wanted
    members = server.get(f"admin/projects/{project_id(server, project)}/members")["members"]
    return str(find("user", wanted, members)["user_id"])


def _state(key: dict[str, Any]) -> str:
    if key.get("revoked_at"):
        return "revoked"
    if not key["active"]:
        return "expired" if _is_past(key.get("expires_at")) else "shut out"  # its project is archived
    return "replaced" if key.get("replaced_by") else "active"


def _is_past(moment: str | None) -> bool:
    return moment is not None and datetime.fromisoformat(moment) <= datetime.now(UTC)


def _tell(made: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json("key", made)
        return
    info = made["info"]
    ends = f", until {info['expires_at']}" if info.get("expires_at") else ""
    scopes = f" ({', '.join(info['scopes'])})" if info.get("scopes") else ""
    say(f"key {info['key_id']} {info['name']!r}: {info['role']}{scopes}{ends}; shown this once", err=True)
    typer.echo(made["key"])
