"""`tinsmith models`: which base models a running server serves, and adding and removing them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from app.settings import Settings

FAILED = 1
ADD_SECONDS = 1800.0
"""Loading a base model may take long; the server itself gives up earlier."""

app = typer.Typer(help="Base models of a running server: list, add, remove. For its operator.", no_args_is_help=True)

Url = Annotated[
    str, typer.Option(help="The running server. (variable TINSMITH_URL)", envvar="TINSMITH_URL", show_envvar=False)
]
Key = Annotated[
    str | None,
    typer.Option(
        help="The development key; without it the file dev_key in the data folder. (variable TINSMITH_KEY)",
        envvar="TINSMITH_KEY",
        show_envvar=False,
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="The server's data folder, where dev_key is.")]
DEFAULT_URL = "http://127.0.0.1:8410"


@app.command("list")
def list_models(*, url: Url = DEFAULT_URL, api_key: Key = None, data_dir: DataDir = None) -> None:
    """Every base model, its state, and how many training runs are live on it."""
    for model in _call("GET", url, "", api_key, data_dir)["models"]:
        origin = "added" if model["added"] else "settings"
        detail = f"  {model['detail']}" if model.get("detail") else ""
        typer.echo(f"{model['name']}  {model['state']}  {origin}  {model['live_runs']} live runs{detail}")


@app.command("add")
def add_model(
    model: Annotated[str, typer.Argument(metavar="NAME[=PATH]", help="As for serve --base-model.")],
    *,
    tokenizer_id: Annotated[str | None, typer.Option(help="What clients are told to load as tokenizer.")] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    data_dir: DataDir = None,
) -> None:
    """Serve another base model; ends when it is loaded. A restart of the server serves it again."""
    name, _, path = model.partition("=")
    if path.startswith((".", "~")):
        path = str(Path(path).expanduser().absolute())
    body = {"name": name, "path": path or None, "tokenizer_id": tokenizer_id}
    added = _call("POST", url, "", api_key, data_dir, {key: value for key, value in body.items() if value is not None})
    typer.echo(f"{added['name']}  {added['state']}")


@app.command("remove")
def remove_model(
    name: Annotated[str, typer.Argument(help="A base model that was added.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also if training runs are live on it: they are lost.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    data_dir: DataDir = None,
) -> None:
    """Serve a base model no longer that was added while the server ran."""
    _call("DELETE", url, f"/{quote(name)}{'?force=true' if force else ''}", api_key, data_dir)
    typer.echo(f"{name}  removed")


def _call(
    method: str, url: str, rest: str, api_key: str | None, data_dir: Path | None, body: dict[str, Any] | None = None
) -> Any:
    """The answer's JSON; ends the command with the server's words if it is an error."""
    import httpx

    headers = {"X-API-Key": api_key or _development_key(data_dir)}
    address = f"{url.rstrip('/')}/api/v1/admin/models{rest}"
    try:
        answer = httpx.request(method, address, headers=headers, json=body, timeout=ADD_SECONDS)
    except httpx.HTTPError:
        raise _fail(f"no server answers at {url}; start one with `tinsmith serve`") from None
    if answer.is_error:
        try:
            raise _fail(str(answer.json()["detail"]))
        except (ValueError, KeyError):
            raise _fail(f"the server at {url} answered {answer.status_code}") from None
    return answer.json() if answer.content else None


def _development_key(data_dir: Path | None) -> str:
    configured = os.environ.get("TINSMITH_DATA_DIR")
    folder = (data_dir or (Path(configured) if configured else Settings().data_dir)).expanduser()
    try:
        return (folder / "dev_key").read_text(encoding="ascii").strip()
    except OSError as error:
        raise _fail(f"no key: {folder / 'dev_key'} cannot be read ({error.strerror}); give --api-key") from None


def _fail(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(FAILED)
