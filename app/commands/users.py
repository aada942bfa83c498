"""`tinsmith users`: the users of a running server, and what they are in its projects."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Url, connect
from app.commands.output import print_json, say
from app.commands.tenants import project_id, show, user_id

app = typer.Typer(
    help="Users of a running server, and their roles in projects. For its operator.", no_args_is_help=True
)

User = Annotated[str, typer.Argument(metavar="USER", help="Name or id of the user.")]
Project = Annotated[str, typer.Option("--project", help="Name or id of the project.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also if nobody is left then who may manage the keys of a project.")
]


@app.command("list")
def list_users(
    *,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Every user, and what each is in which project."""
    server = connect(url, api_key, data_dir)
    users = server.get("admin/users")["users"]
    names = {project["project_id"]: project["name"] for project in server.get("admin/projects")["projects"]}
    roles = [[f"{names[each['project_id']]}:{each['role']}" for each in user["projects"]] for user in users]
    shown = users if as_json else [{**user, "roles": role} for user, role in zip(users, roles, strict=True)]
    columns = {"user_id": "id", "name": "name", "roles": "roles"}
    show("users", shown, columns, as_json=as_json, empty="no users yet: `tinsmith users create NAME` makes one")


@app.command("create")
def create_user(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For people; no other user has it or had it.")],
    *,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Add a user and print the id. A user is nothing in any project yet: `users grant`."""
    made = connect(url, api_key, data_dir).post("admin/users", {"name": name})
    if as_json:
        print_json("user", made)
    else:
        say(made["user_id"])


@app.command("delete")
def delete_user(
    user: User, *, force: Force = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, data_dir: DataDir = None
) -> None:
    """Delete a user: all of the user's roles and keys end."""
    server = connect(url, api_key, data_dir)
    server.delete(f"admin/users/{user_id(server, user)}", force=force or None)
    say(f"{user}  deleted")


@app.command("grant")
def grant(
    user: User,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="read-only, member, owner or admin.")],
    *,
    project: Project,
    force: Force = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Give a user a role in a project, or another one: the user's keys there can do no more from then on."""
    server = connect(url, api_key, data_dir)
    address = f"admin/projects/{project_id(server, project)}/members/{user_id(server, user)}"
    server.call("PUT", address, body={"role": role}, query={"force": force or None})
    say(f"{user}  {role} in {project}")


@app.command("withdraw")
def withdraw(
    user: User,
    *,
    project: Project,
    force: Force = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Take a user out of a project; the user's keys there are revoked."""
    server = connect(url, api_key, data_dir)
    server.delete(f"admin/projects/{project_id(server, project)}/members/{user_id(server, user)}", force=force or None)
    say(f"{user}  not in {project} any more")
