"""`tinsmith models`: which base models a running server serves, and adding and removing them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Url, connect
from app.commands.output import plain, print_json, print_table, working
from app.commands.values import model_part

ADD_SECONDS = 1800.0
"""Loading a base model may take long; the server itself gives up earlier."""

app = typer.Typer(help="Base models of a running server: list, add, remove. For its operator.", no_args_is_help=True)


@app.command("list")
def list_models(
    *, url: Url = DEFAULT_URL, api_key: ApiKey = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Every base model, its state, and how many training runs are live on it."""
    models = connect(url, api_key, data_dir).get("admin/models")["models"]
    if as_json:
        print_json("models", models)
        return
    print_table(
        ("base model", "state", "from", "live runs", "detail"),
        [
            (
                each["name"],
                each["state"],
                "added" if each["added"] else "settings",
                each["live_runs"],
                each.get("detail"),
            )
            for each in models
        ],
        right=("live runs",),
        empty="no base models: `tinsmith models add NAME=FOLDER` adds one",
    )


@app.command("add")
def add_model(
    model: Annotated[str, typer.Argument(metavar="NAME[=PATH]", help="As for serve --base-model.")],
    *,
    tokenizer_id: Annotated[str | None, typer.Option(help="What clients are told to load as tokenizer.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Serve another base model; ends when it is loaded. A restart of the server serves it again."""
    name, _, path = model.partition("=")
    if path.startswith((".", "~")):
        path = str(Path(path).expanduser().absolute())
    body = {"name": name, "path": path or None, "tokenizer_id": tokenizer_id}
    server = connect(url, api_key, data_dir)
    with working(f"loading {name}, which may take minutes"):
        added = server.post("admin/models", body, seconds=ADD_SECONDS)
    typer.echo(f"{plain(added['name'])}  {plain(added['state'])}")


@app.command("remove")
def remove_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A base model that was added.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also if training runs are live on it: they are lost.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Serve a base model no longer that was added while the server ran."""
    part, server = model_part(name), connect(url, api_key, data_dir)
    server.call("DELETE", f"admin/models/{part}", query={"force": force or None}, seconds=ADD_SECONDS)
    typer.echo(f"{name}  removed")
