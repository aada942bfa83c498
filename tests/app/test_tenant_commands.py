"""`tinsmith projects`, `users` and `keys` against a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app import cli
from app.commands.client import FAILED, NOT_ALLOWED
from app.settings import Settings
from tests.support.idle_server import IdleServer, listening

KEY = re.compile(r"tml-[A-Za-z0-9_-]{43}\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleServer]:
    data_dir = tmp_path_factory.mktemp("commands") / "data"
    settings = Settings(data_dir=data_dir, base_model=["acme/tiny=/nowhere"], shutdown_grace=1.0)
    with listening(settings) as running:
        yield running


class Shell:
    """Runs commands against the server, with its development key unless told otherwise."""

    def __init__(self, server: IdleServer) -> None:
        self.server = server

    def run(self, line: str, *, key: str | None = None) -> Result:
        """One command, whatever comes of it."""
        environment = {"TINSMITH_URL": self.server.url, "TINSMITH_KEY": key or self.server.key}
        return CliRunner().invoke(cli.app, line.split(), env=environment)

    def out(self, line: str, *, key: str | None = None) -> str:
        """What a command prints that must succeed."""
        done = self.run(line, key=key)
        assert done.exit_code == 0, done.output
        return done.stdout

    def json(self, line: str, *, key: str | None = None) -> Any:
        """What it prints as JSON."""
        return json.loads(self.out(f"{line} --json", key=key))["data"]

    def fails(self, line: str, code: int, *words: str, key: str | None = None) -> None:
        """The command must end like this, and say these words on stderr, without the key."""
        done = self.run(line, key=key)
        assert (done.exit_code, done.stdout) == (code, ""), done.output
        for word in words:
            assert word in done.stderr
        assert (key or self.server.key) not in done.output


@pytest.fixture
def shell(server: IdleServer) -> Shell:
    return Shell(server)


def test_the_help_names_every_command() -> None:
    for group, commands in (
        ("projects", ("list", "create", "archive")),
        ("users", ("list", "create", "delete", "grant", "withdraw")),
        ("keys", ("list", "create", "revoke", "rotate")),
    ):
        shown = CliRunner().invoke(cli.app, [group, "--help"]).output
        for command in commands:
            assert re.search(rf"^\s+{command}\s", shown, re.MULTILINE), (group, command)


def test_a_tenant_from_the_first_command_to_the_last(shell: Shell) -> None:
    project = shell.out("projects create acme").strip()
    user = shell.out("users create ada").strip()
    assert shell.out(f"users grant ada owner --project {project}") == f"ada  owner in {project}\n"
    printed = shell.out("keys create laptop --project acme --role owner --user ada")
    assert KEY.fullmatch(printed), "the key alone, so that it can be piped"
    owner = printed.strip()
    narrow = "keys create robot --role member --scope sample --scope read --expires-in 12h"
    robot = shell.json(narrow, key=owner)
    assert robot["info"]["scopes"] == ["sample", "read"]
    listed = shell.out("keys list", key=owner).splitlines()
    assert [line.split()[1] for line in listed] == ["name", "laptop", "robot"]
    assert "sample,read" in listed[2]
    assert owner[12:] not in "".join(listed)
    assert [key["key_id"] for key in shell.json("keys list --project acme")][1] == robot["info"]["key_id"]
    new = shell.out(f"keys rotate {robot['info']['key_id']} --overlap 0", key=owner).strip()
    assert KEY.fullmatch(f"{new}\n")
    assert len(shell.json("keys list", key=owner)) == 2
    assert [key["state"] for key in shell.json("keys list --all", key=owner)] == ["active", "expired", "active"]
    shell.out(f"keys revoke {shell.json('keys list', key=owner)[1]['key_id']}", key=owner)
    assert "revoked" in shell.out("keys list --all --project acme")
    assert re.search(r"ada\s+acme:owner", shell.out("users list"))
    shell.fails("users withdraw ada --project acme", FAILED, "last key", "force")
    shell.out("users withdraw ada --project acme --force")
    assert shell.json("users list")[0]["projects"] == []
    shell.fails("keys list", NOT_ALLOWED, "does not know this API key", key=owner)
    assert shell.out(f"users delete {user}") == f"{user}  deleted\n"
    shell.out("keys create left --project acme")
    assert shell.out("projects archive acme") == "acme  archived\n"
    assert shell.json(f"keys list --project {project}") == []
    assert "--all shows those that are over" in shell.run(f"keys list --project {project}").output
    assert shell.json(f"keys list --all --project {project}")[-1]["state"] == "shut out"
    assert [each["name"] for each in shell.json("projects list")] == ["default"]
    assert [each["name"] for each in shell.json("projects list --all")] == ["acme", "default"]
    assert "archived" in shell.out("projects list --all")


def test_what_cannot_be_is_two_lines(shell: Shell) -> None:
    member = shell.out("keys create member --role member").strip()
    for line, code, words, key in (
        ("keys list --project nowhere", FAILED, ["no project 'nowhere'", "default"], None),
        ("users delete nobody", FAILED, ["no user 'nobody'", "help: there "], None),
        ("keys create x --role boss", FAILED, ["role", "'owner'"], None),
        ("keys create x --expires-in soon", 2, ["30d"], None),
        ("keys revoke unknown", FAILED, ["there is no key 'unknown'", "tinsmith keys list"], None),
        ("projects list", NOT_ALLOWED, ["lacks the permission admin: its role is member", "role admin"], member),
        ("keys list", NOT_ALLOWED, ["lacks the permission keys", "owner and admin"], member),
    ):
        shell.fails(line, code, *words, key=key)


def test_the_key_comes_from_the_data_folder(server: IdleServer, tmp_path: Path) -> None:
    (tmp_path / "dev_key").write_text(f"{server.key}\n")
    done = CliRunner().invoke(cli.app, ["projects", "list", "--url", server.url, "--data-dir", str(tmp_path)])
    assert (done.exit_code, "default" in done.stdout) == (0, True), done.output
