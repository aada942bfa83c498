"""What commands write: text that cannot steer the terminal, tables, and the one form of JSON.

Names and metadata come from clients of the server, so every character of them that a terminal obeys (escape sequences,
other controls, marks that turn the direction of writing) is written as an escape instead. All commands print through
here. Not responsible for what they print.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import typer

_OBEYED = (
    "\\x00-\\x1f\\x7f-\\x9f"  # controls, ESC and CSI among them
    "\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e"  # invisible, or turning text around
    "\\u2060-\\u206f\\ufeff"
    "\\ud800-\\udfff\\U000e0000-\\U000e007f"  # halves of characters, tags
)
_STEERS = re.compile(f"[{_OBEYED}]")
_STEERS_PROSE = re.compile(f"(?![\n\t])[{_OBEYED}]")
FAILED, USAGE, UNREACHABLE, NOT_ALLOWED, STOPPED = 1, 2, 3, 4, 130
EXIT_CODES = {
    0: "done; for `status`: the server is ready; for `doctor`: nothing is wrong",
    FAILED: "the server refused it, or something on this machine failed",
    USAGE: "the command line or a setting cannot be used, or a question that nobody is there to answer needs `--yes`",
    UNREACHABLE: "no server answers there, it went away before it answered, or what answers is not one",
    NOT_ALLOWED: "there is no key, it is not or no longer valid, or it is not for this",
    STOPPED: "Ctrl-C",
}
"""What the exit codes of commands mean."""
SETTINGS_HELP = "`tinsmith serve --help` and docs/settings.md describe every setting and what it accepts"

KINDS = {
    "status": "`url`, `version`, `engine`, `ready`, `models`, `queue` (null: it has none), `runs`, `runs_total`",
    "runs": "`runs` as `GET training_runs` has them, `total`",
    "run": "`run`, `checkpoints`",
    "metrics": "`training_run_id`, `points`: one for each optimizer step",
    "checkpoints": "`checkpoints` as `GET checkpoints` has them, `total`",
    "checkpoint": "the checkpoint with its base model and geometry, `files` with `size_bytes` and `sha256`",
    "download": "`tinker_path`, `folder`, `files`",
    "import": "`tinker_path`, `base_model`, `size_bytes`, `lora_rank`, `train_attn`, `train_mlp`, `train_unembed`",
    "export": "`tinker_path`, `format`, `folder`, `files`",
    "sample": "`model`, `text`, `finish_reason`",
    "chat": "`model`, `text`, `finish_reason`",
    "usage": "`starting_on`, `ending_before`, `days` (one for each day and base model), `stored`",
    "models": "a list: `name`, `state`, `added`, `live_runs`, `detail`",
    "keys": "a list as `GET keys` has it, with `state`",
    "key": "the new key: `key`, shown this once, and `info`",
    "projects": "a list as `GET admin/projects` has it",
    "project": "the new project",
    "users": "a list as `GET admin/users` has it",
    "user": "the new user",
    "limits": "`project_id`, `key_id`, `limits`: `name`, `value`, `source`, `used`, `remaining`",
    "doctor": "`ok`, `data_dir`, `checks`: `name`, `status`, `detail`, `items`",
    "version": "`version`",
}
"""What `data` holds by `kind`, wherever a command writes JSON."""

NOTHING = "-"
"""What a table shows where there is no value."""


def plain(value: object) -> str:
    """One line of text that a terminal only shows."""
    return _STEERS.sub(_escaped, str(value))


def prose(value: str) -> str:
    """As `plain`, with line breaks and tabs as they are."""
    return _STEERS_PROSE.sub(_escaped, value)


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("ascii", "backslashreplace").decode() if ord(match.group()) > 127 else _ascii(match)


def _ascii(match: re.Match[str]) -> str:
    return f"\\x{ord(match.group()):02x}"


def say(text: object = "", *, err: bool = False) -> None:
    """Print a line."""
    typer.echo(plain(text), err=err)


def write(text: str) -> None:
    """Print a piece of text as it comes, without a line break behind it."""
    sys.stdout.write(prose(text))
    sys.stdout.flush()


def print_json(kind: str, data: Any) -> None:
    """Print `{"kind": kind, "data": data}`: what every command writes with --json. ASCII, so nothing steers.

    Raises `ValueError` for a kind that `KINDS` does not describe.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind} is not described")
    typer.echo(json.dumps({"kind": kind, "data": data}, indent=2, ensure_ascii=True, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = (), empty: str | None = None
) -> None:
    """Print rows under headings: nothing is cut, so that a pipe gets whole values.

    In a terminal that is too narrow for the table each row becomes lines of its own, one for each value.

    Args:
        right: the columns whose values stand at the right.
        empty: what is said on stderr instead of a table without rows: that there is none, and how to make the first.
    """
    if not rows and empty is not None:
        say(empty, err=True)
        return
    cells = [[NOTHING if value in (None, "") else plain(value) for value in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(columns, *cells, strict=True)]
    if sys.stdout.isatty() and sum(widths) + 2 * (len(widths) - 1) > shutil.get_terminal_size().columns:
        for number, row in enumerate(rows):
            if number:
                typer.echo()
            print_facts(dict(zip(columns, row, strict=True)))
        return
    for line in [list(columns), *cells]:
        padded = [
            " " * (width - _width(cell)) + cell if name in right else cell + " " * (width - _width(cell))
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        typer.echo("  ".join(padded).rstrip())


def print_facts(facts: Mapping[str, object]) -> None:
    """Print names and values, one pair on a line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {NOTHING if value in (None, '') else plain(value)}")


def _width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def size_text(count: float | None) -> str | None:
    """Bytes for people."""
    if count is None:
        return None
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def time_text(text: str | None) -> str | None:
    """A time of the server's JSON, to the second, in UTC."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text


def fail(cause: str, remedy: str, code: int = FAILED) -> typer.Exit:
    """Say on stderr what is wrong, and on a second line what to do; returns the exit to raise.

    A cause may have several lines, such as one for each setting that is wrong.
    """
    for line in cause.splitlines() or [cause]:
        say(f"error: {line}", err=True)
    say(f"help: {remedy}", err=True)
    return typer.Exit(code)


def warn(text: str) -> None:
    """Say on stderr what a person should know, though the work goes on."""
    say(f"warning: {text}", err=True)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that something takes its time; what is yielded says what is being done now.

    In a terminal it is one line with the seconds, which goes away at the end; elsewhere a line for each step.
    """
    if not sys.stderr.isatty():
        say(text, err=True)
        yield lambda step: say(step, err=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(plain(text), total=None)
        yield lambda step: shown.update(task, description=plain(step))
