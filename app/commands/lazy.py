"""A group of commands whose modules are imported only when one of them is called or asked for help.

Responsible for `tinsmith --help` answering at once. Not responsible for which commands there are (`app/cli.py`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command is. `group`: it has commands of its own."""

    module: str
    help: str
    group: bool = False


class QuickGroup(TyperGroup):
    """`typer`'s group, whose own switches are off if they are not given, and which knows what was misspelt.

    For those switches `typer` imports pydantic, which takes longer than all the rest, to find out that None is None.
    """

    def get_params(self, ctx: Any) -> Any:
        """See click."""
        parameters = super().get_params(ctx)
        for parameter in parameters:
            descriptor = getattr(parameter, "type_descriptor", None)
            if descriptor is not None and descriptor.annotation is bool and parameter.default is None:
                parameter.default = False
        return parameters

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click. An unknown name is compared with all that there are."""
        known = self.list_commands(ctx)
        if args and not ctx.resilient_parsing and args[0] not in known and args[0][:1].isalnum():
            from app.commands.usage_errors import UnknownCommand

            raise UnknownCommand(args[0], known, ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(QuickGroup):
    """A group with commands out of `table` in its order. Each module has a `typer.Typer` named `app`."""

    table: ClassVar[Mapping[str, Entry]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """See click."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """See click."""
        if cmd_name not in self.commands and cmd_name in self.table:
            self.commands[cmd_name] = load(cmd_name, self.table[cmd_name])
        return self.commands.get(cmd_name)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """See click. What goes wrong is told in our words, and ends with our codes."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            code = self._told(error, words)
        sys.exit(code if isinstance(code, int) else 0)

    def _told(self, error: Exception, words: Sequence[str]) -> int:
        """The exit code for an error that a command line ended with, after it was told."""
        from typer._click.exceptions import ClickException, NoArgsIsHelpError

        from app.commands.output import FAILED, STOPPED, USAGE, fail
        from app.commands.usage_errors import explain

        if isinstance(error, NoArgsIsHelpError):
            error.show()
            return USAGE
        if isinstance(error, ClickException):
            fail(*explain(error, self._meant(words)))
            return USAGE
        if isinstance(error, typer.Abort):
            fail("stopped: nothing was done", "run the command again")
            return STOPPED
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            what = f"{error.filename}: " if error.filename else ""
            fail(f"{what}{error.strerror or type(error).__name__}", "see that the place exists, is yours and has room")
            return FAILED
        if isinstance(error, UnicodeError):  # from the command line or stdin: what comes from elsewhere is replaced
            fail("what was given is not text in UTF-8", "convert it first, as `iconv -f LATIN1 -t UTF-8` does")
            return USAGE
        raise error

    def _meant(self, words: Sequence[str]) -> str:
        """`tinsmith` and the words of a command line that are commands."""
        meant = ["tinsmith", *(word for word in words[:1] if word in self.table)]
        if len(meant) == 2 and self.table[words[0]].group:
            meant += [word for word in words[1:2] if word in self.get_command(None, words[0]).commands]
        return " ".join(meant)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """See click. The texts are those of the table, so nothing is imported for them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.table.items()])


def load(name: str, entry: Entry) -> Any:
    """The command of an entry, as click has it."""
    outer = typer.Typer(add_completion=False, rich_markup_mode=None)
    app: typer.Typer = importlib.import_module(entry.module).app
    if entry.group:
        outer.add_typer(app, name=name, cls=QuickGroup, no_args_is_help=True)
    else:
        outer.add_typer(app)
    group: Any = typer.main.get_command(outer)
    return group.commands[name]
