"""One call of every command of the `tinker` command line, as a user would type it, against running servers.

A method for each command (`checkpoint_set_ttl` for `checkpoint set-ttl`): the docstring says what is typed, the return
value what was found to hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.compat.sdk_calls import MODEL, SECONDS, World
from tests.support.hub import hub
from tests.support.server import environment
from tests.support.tinker_command import run_tinker


@dataclass
class Command:
    """Runs one command in a home of its own."""

    world: World
    words: tuple[str, ...]
    home: Path

    def __call__(self, *arguments: str, **more: Any) -> Any:
        """Run it with `-f json`; what it printed, parsed."""
        return json.loads(self.text(*arguments, before=("-f", "json"), **more))

    def text(
        self,
        *arguments: str,
        before: tuple[str, ...] = (),
        stdin: str = "",
        identified: bool = False,
        fresh: bool = False,
        **extra: str,
    ) -> str:
        """Run it; what it printed. `identified`: against the server with tokens. `fresh`: see `run_tinker`. `extra`:
        environment variables."""
        world = self.world
        url, key = (world.identified_url, world.identified_key) if identified else (world.url, world.key)
        variables = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "HOME": str(self.home), **extra}
        wanted = {name: value for name, value in environment(variables).items() if value}
        line = [*before, *self.words, *arguments]
        done = run_tinker(line, wanted, self.home, stdin=stdin, seconds=SECONDS, fresh=fresh)
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}{done.stdout}"
        return done.stdout


class Commands:
    def auth_login(self, world: World, command: Command) -> str:
        """`auth login`, a key pasted"""
        assert "(default)" in command.text(stdin=f"{world.key}\n", TINKER_API_KEY="")
        return "the key is checked and stored"

    def auth_logout(self, world: World, command: Command) -> str:
        """`auth logout`, after a login"""
        Command(world, ("auth", "login"), command.home).text(stdin=f"{world.key}\n", TINKER_API_KEY="")
        command.text(TINKER_API_KEY="")
        stored = command.home / ".tinker/credentials.json"
        assert not stored.exists() or world.key not in stored.read_text()
        return "the key is no longer stored"

    def auth_status(self, world: World, command: Command) -> str:
        """`auth status`"""
        assert "Tinker accessible: yes" in command.text()
        return "accessible"

    def auth_whoami(self, world: World, command: Command) -> str:
        """`auth whoami`, on a server with `pjwt_auth_enabled`"""
        assert command(identified=True)["user_urn"].startswith("tml:user:")
        return "the project behind the key"

    def billing_checkpoint_storage(self, world: World, command: Command) -> str:
        """`billing checkpoint-storage`"""
        assert command()["data"][0]["size_bytes"] > 0
        return "number and size of the checkpoints"

    def billing_usage(self, world: World, command: Command) -> str:
        """`billing usage START END`"""
        end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        rows = command((end - timedelta(hours=3)).isoformat(), end.isoformat())["data"]
        assert "training" in {row["event_info"]["type"] for row in rows}
        return "tokens trained and sampled, checkpoints, by the hour"

    def checkpoint_delete(self, world: World, command: Command) -> str:
        """`checkpoint delete PATH --yes`"""
        path = world.saved()
        command.text(path, "--yes")
        assert world.listed(path) is None
        return "the checkpoint is gone from the list"

    def checkpoint_download(self, world: World, command: Command) -> str:
        """`checkpoint download PATH`, of a training checkpoint"""
        command.text(world.state, "--output", str(command.home / "out"))
        [config] = (command.home / "out").rglob("adapter_config.json")
        assert json.loads(config.read_text())["r"] == 4
        assert config.with_name("adapter_model.safetensors").stat().st_size > 1000
        return "a PEFT adapter"

    def checkpoint_info(self, world: World, command: Command) -> str:
        """`checkpoint info PATH`"""
        assert world.state in json.dumps(command(world.state))
        return "the checkpoint"

    def checkpoint_list(self, world: World, command: Command) -> str:
        """`checkpoint list`"""
        assert world.state in {each["tinker_path"] for each in command("--limit", "0")["checkpoints"]}
        return "the project's checkpoints"

    def checkpoint_publish(self, world: World, command: Command) -> str:
        """`checkpoint publish PATH`"""
        path = world.saved()
        command.text(path)
        assert world.listed(path).public
        return "the checkpoint is public"

    def checkpoint_push_hf(self, world: World, command: Command) -> str:
        """`checkpoint push-hf PATH --repo tester/adapter`, to a stand-in for the hub"""
        with hub() as stand_in:
            upload = {"HF_ENDPOINT": stand_in.url, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": ""}
            command.text(world.exported(), "--repo", "tester/adapter", **upload)
            assert json.loads(stand_in.files["tester/adapter"]["adapter_config.json"])["r"] == 4
            assert {"adapter_model.safetensors", "README.md"} <= set(stand_in.files["tester/adapter"])
        return "the adapter and a model card are committed"

    def checkpoint_set_ttl(self, world: World, command: Command) -> str:
        """`checkpoint set-ttl PATH --ttl 3600`"""
        path = world.saved()
        command.text(path, "--ttl", "3600")
        assert world.listed(path).expires_at is not None
        return "the checkpoint expires"

    def checkpoint_unpublish(self, world: World, command: Command) -> str:
        """`checkpoint unpublish PATH`, of a public one"""
        path = world.saved()
        world.rest.publish_checkpoint_from_tinker_path(path).result(SECONDS)
        command.text(path)
        assert not world.listed(path).public
        return "the checkpoint is private again"

    def model_list(self, world: World, command: Command) -> str:
        """`model list`"""
        assert MODEL in json.dumps(command())
        return "the served base models"

    def run_info(self, world: World, command: Command) -> str:
        """`run info ID`"""
        assert MODEL in json.dumps(command(world.client.model_id))
        return "the run"

    def run_list(self, world: World, command: Command) -> str:
        """`run list`"""
        assert world.client.model_id in json.dumps(command("--limit", "0"))
        return "the project's runs"

    def session_export_trace(self, world: World, command: Command) -> str:
        """`session export-trace ID -o FILE`"""
        command.text(world.session, "-o", "trace.json")
        assert json.loads((command.home / "trace.json").read_text())["traceEvents"]
        return "a trace with the session's operations"

    def version(self, world: World, command: Command) -> str:
        """`version`"""
        assert "0.38.0" in command.text(fresh=True)
        return "the version; asks nothing"
