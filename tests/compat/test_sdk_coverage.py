"""Every public method of the SDK's clients and every command of `tinker` works, and docs/sdk_coverage.md says so.

The page is made from the calls themselves: `python -m tests.compat.test_sdk_coverage` writes it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import tinker
from tinker.cli.__main__ import main_cli

from tests.compat import sdk_calls
from tests.compat.cli_calls import Command, Commands
from tests.compat.sdk_calls import MODEL, World, settled
from tests.support.server import serve
from tests.support.tiny_model import make_tiny_model

PAGE = Path(__file__).parents[2] / "docs/sdk_coverage.md"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
OWN_ATTRIBUTE = {"ServiceClient": "service", "TrainingClient": "client", "SamplingClient": "sampler"}
HEADER = f"""# What of the SDK works

Every public method of the clients of `tinker` {version("tinker")} and every command of `tinker`, as found by looking
into the package. Each is called against a running server by `tests/compat/test_sdk_coverage.py`, which also makes this
page; a method that fails, or that nobody calls, fails the tests.
"""


@dataclass(frozen=True)
class Row:
    """One method or command: what was called and what came of it. `failure`: a traceback, or None."""

    section: str
    name: str
    called: str
    outcome: str
    failure: str | None = None


def methods(client: str) -> list[str]:
    """The public methods of a client of the SDK."""
    return [name for name, found in inspect.getmembers(getattr(tinker, client), callable) if not name.startswith("_")]


def commands(group: click.Group = main_cli, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        found = group.get_command(context, name)
        if isinstance(found, click.Group) and found.list_commands(context):
            yield from commands(found, (*before, name))
        else:
            yield (*before, name)


@contextmanager
def world(scratch: Path) -> Iterator[World]:
    """Two servers on the tiny model, one of them with tokens, and a World on the first."""
    tiny = make_tiny_model(scratch / MODEL)
    arguments = ["--base-model", f"{MODEL}={tiny}", "--threads", "1", "--shutdown-grace", "2"]
    with (
        chdir(scratch),  # where the SDK finds a folder under the name of the base model, which is on no hub
        serve(scratch / "plain", arguments) as plain,
        serve(scratch / "identified", [*arguments, "--pjwt-auth-enabled", "true"]) as identified,
    ):
        made = World(plain.url, plain.key, identified.url, identified.key)
        yield made
        settled(made.service.close("success"))


def call_method(world: World, client: str, name: str) -> Row:
    """Call one method of the SDK."""
    calls = getattr(sdk_calls, client)()
    own = getattr(calls, name, None) or getattr(calls, name.removesuffix("_async"), None)
    if own is None:
        return Row(client, name, "nothing", "NOT CALLED", "no call is written for it")

    def call(*arguments: Any, target: Any = None, **keywords: Any) -> Any:
        usual = getattr(world, OWN_ATTRIBUTE.get(client, client.removesuffix("Client").lower()))
        return settled(getattr(target or usual, name)(*arguments, **keywords))

    return attempt(client, name, own, functools.partial(own, world, call))


def call_command(world: World, words: tuple[str, ...], home: Path) -> Row:
    """Run one command."""
    own = getattr(Commands(), "_".join(words).replace("-", "_"), None)
    name = f"tinker {' '.join(words)}"
    if own is None:
        return Row("Command line", name, "nothing", "NOT CALLED", "no call is written for it")
    home.mkdir()
    return attempt("Command line", name, own, functools.partial(own, world, Command(world, words, home)))


def attempt(section: str, name: str, own: Any, run: Any) -> Row:
    """A row about what `run` returns or raises."""
    called = inspect.getdoc(own) or ""
    try:
        return Row(section, name, called, run())
    except Exception:
        return Row(section, name, called, "FAILS", traceback.format_exc(limit=-4))


def collect(scratch: Path) -> list[Row]:
    """Call everything once, in the order of the page."""
    with world(scratch) as made:
        rows = [call_method(made, client, name) for client in CLIENTS for name in methods(client)]
        with ThreadPoolExecutor(2) as pool:  # most of a command's time goes into its start
            rows += pool.map(lambda words: call_command(made, words, scratch / "-".join(words)), commands())
    return rows


def page(rows: list[Row]) -> str:
    """The page: a table for each client and one for the command line."""
    lines = [HEADER]
    sections: Mapping[str, list[Row]] = {row.section: [] for row in rows}
    for row in rows:
        sections[row.section].append(row)
    for section, members in sections.items():
        lines += [f"## {section}", "", "| method | called with | outcome |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.called} | {row.outcome} |" for row in members]
        lines.append("")
    return "\n".join(lines)


pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Row]]:
    """Every method and every command, called once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TINKER_")]:
            patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield collect(tmp_path_factory.mktemp("coverage"))


@pytest.mark.slow
def test_every_method_and_command_works(rows: list[Row]) -> None:
    failed = [f"{row.section} {row.name}: {row.failure}" for row in rows if row.failure is not None]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_the_page_is_current(rows: list[Row]) -> None:
    assert PAGE.read_text() == page(rows), "run: python -m tests.compat.test_sdk_coverage"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = collect(Path(folder))
    PAGE.write_text(page(found))
    sys.stdout.writelines(f"{row.section} {row.name}: {row.failure}\n" for row in found if row.failure is not None)
