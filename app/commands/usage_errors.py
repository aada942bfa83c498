"""What is said of a command line that cannot be used, in the two lines of every other error.

Not responsible for finding such errors (typer does), nor for values of settings (`app/settings/loading.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from typer._click import exceptions as usage  # typer, which is pinned, has no public name for the kinds of these errors

_KINDS = {"int": "a whole number", "float": "a number"}


def explain(error: usage.ClickException, command: str) -> tuple[str, str]:
    """The cause and the remedy of an error that typer raised.

    Args:
        command: the words of the command that was meant, for errors that do not tell it ("tinsmith runs list").
    """
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context is not None else command
    options = f"`{command} --help` describes its options"
    if isinstance(error, UnknownCommand):
        return error.message, error.remedy(command)
    if isinstance(error, usage.NoSuchOption):
        close = " or ".join(sorted(error.possibilities or ()))
        cause = f"`{command}` has no option {error.option_name}"
        return cause, f"did you mean {close}? {options}" if close else options
    if isinstance(error, usage.BadOptionUsage):
        takes = "takes no value" if "not take" in error.message else "needs a value"
        return f"{error.option_name} {takes}", options
    if isinstance(error, usage.MissingParameter) and error.param is not None:
        return f"{_name(error.param)} is missing", f"write `{_form(context, command)}`; {options}"
    if isinstance(error, usage.BadParameter) and error.param is not None:
        return _refused(error, error.param), f"give {accepted(error.param)}; {options}"
    if error.message.startswith("Got unexpected extra argument"):
        words = error.message.partition("(s) (")[2].removesuffix(")")
        return f"there is nothing that {words!r} could be", f"write `{_form(context, command)}`; {options}"
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:], options


class UnknownCommand(usage.UsageError):
    """A word that should be a command and is none of `known`."""

    def __init__(self, word: str, known: Iterable[str], context: Any) -> None:
        super().__init__(f"there is no command {word!r}", context)
        self._close = difflib.get_close_matches(word, list(known), n=1)

    def remedy(self, group: str) -> str:
        """What to do."""
        meant = f"did you mean `{group} {self._close[0]}`? " if self._close else ""
        return f"{meant}`{group} --help` lists the commands"


def accepted(parameter: Any) -> str:
    """What a parameter takes, in words."""
    described = parameter.type_descriptor
    if described.choices:
        return f"one of {', '.join(str(getattr(each, 'value', each)) for each in described.choices)}"
    kind = _KINDS.get(getattr(described.annotation, "__name__", ""), "another value")
    least, most = described.parameter_info.min, described.parameter_info.max
    if least is not None and most is not None:
        return f"{kind} from {least:g} to {most:g}"
    return kind if least is None else f"{kind}, {least:g} or more"


def _refused(error: usage.BadParameter, parameter: Any) -> str:
    """The parameter with the value that was given, if the error tells it."""
    details = getattr(error.__cause__, "errors", None)
    found = details()[0] if details is not None else {}
    if "input" in found and isinstance(found["input"], str | int | float):
        return f"{_name(parameter)} cannot be {found['input']!r}"
    return f"{_name(parameter)}: {error.message}"


def _name(parameter: Any) -> str:
    return str(parameter.opts[0]) if parameter.param_type_name == "option" else f"the argument {_metavar(parameter)}"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _form(context: Any, command: str) -> str:
    """How a command is written: its arguments, and that it has options."""
    parameters = context.command.params if context is not None else []
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    words = [_metavar(each) if each.required else f"[{_metavar(each).strip('[]')}]" for each in arguments]
    return " ".join([command, *words, "[OPTIONS]"])
