"""`tinsmith projects`: the projects of a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Url, connect
from app.commands.output import print_json, say
from app.commands.tenants import project_id, show

app = typer.Typer(
    help="Projects (tenants) of a running server: list, create, archive. For its operator.", no_args_is_help=True
)

COLUMNS = {
    "project_id": "id",
    "name": "name",
    "live_runs": "live runs",
    "created_at": "created",
    "archived_at": "archived",
}


@app.command("list")
def list_projects(
    *,
    every: Annotated[bool, typer.Option("--all", help="Also archived ones.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Every project, and how many training runs are live in it."""
    found = connect(url, api_key, data_dir).get("admin/projects")["projects"]
    shown = [project for project in found if every or not project.get("archived_at")]
    columns = COLUMNS if every else {field: head for field, head in COLUMNS.items() if field != "archived_at"}
    empty = "no projects yet: `tinsmith projects create NAME` makes one"
    show("projects", shown, columns, as_json=as_json, empty=empty)


@app.command("create")
def create_project(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For people; no other project has it.")],
    *,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Add a project and print its id. Nobody is in it until a key is made: `keys create NAME --project ...`."""
    made = connect(url, api_key, data_dir).post("admin/projects", {"name": name})
    if as_json:
        print_json("project", made)
    else:
        say(made["project_id"])


@app.command("archive")
def archive_project(
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="Name or id of the project.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Also if training runs are live: they end.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Let nobody into a project any more. Its checkpoints and usage stay; there is no way back."""
    server = connect(url, api_key, data_dir)
    server.delete(f"admin/projects/{project_id(server, project)}", force=force or None)
    say(f"{project}  archived")
