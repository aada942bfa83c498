"""The command `tinsmith`: which commands there are. Each is a module of `app/commands`, imported when it is called."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from app.commands.lazy import Entry, LazyGroup

COMMANDS: Mapping[str, Entry] = {
    "serve": Entry("app.commands.serve", "Start the server and keep it in the foreground."),
    "status": Entry("app.commands.status", "How a server is: version, base models, what waits, your runs."),
    "runs": Entry("app.commands.runs", "Training runs: list, show, watch.", group=True),
    "checkpoints": Entry("app.commands.checkpoints", "Checkpoints: list, fetch, export, bring in.", group=True),
    "sample": Entry("app.commands.sample", "Complete a text with a base model or a checkpoint."),
    "chat": Entry("app.commands.chat", "Talk to a base model or a checkpoint."),
    "usage": Entry("app.commands.usage", "What the project used, by the day."),
    "models": Entry("app.commands.models", "Base models of a running server: list, add, remove.", group=True),
    "keys": Entry("app.commands.keys", "API keys: list, create, revoke, rotate.", group=True),
    "projects": Entry("app.commands.projects", "Projects of a server: list, create, archive.", group=True),
    "users": Entry("app.commands.users", "Users and their roles in projects.", group=True),
    "limits": Entry("app.commands.limits", "Limits and budgets of keys and projects: show, set, clear.", group=True),
    "logs": Entry("app.commands.logs", "The end of the server's log."),
    "doctor": Entry("app.commands.doctor", "Check a data folder and this machine."),
    "backup": Entry("app.commands.backup", "Copy a data folder while its server runs."),
    "tokenizer": Entry("app.commands.tokenizer", "Let clients load a tokenizer by name, without the hub."),
    "demo": Entry("app.commands.demo", "Fine-tune a model on a few poems, on a running server."),
    "openapi": Entry("app.commands.openapi", "Write the description of the HTTP API."),
    "version": Entry("app.commands.version", "Print the version."),
}


class Commands(LazyGroup):
    """All of them."""

    table: ClassVar[Mapping[str, Entry]] = COMMANDS


app = typer.Typer(
    name="tinsmith",
    cls=Commands,
    help="A self-hosted fine-tuning API that speaks Tinker's protocol.",
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes cut long option names in a narrow terminal
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `tinsmith` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character gets its number
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as installed_version

        typer.echo(installed_version("tinsmith"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A self-hosted fine-tuning API that speaks Tinker's protocol."""
