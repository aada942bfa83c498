"""`tinsmith version`: the version of this installation."""

from __future__ import annotations

from importlib.metadata import version as installed_version

import typer

from app.commands.client import AsJson
from app.commands.output import print_json

app = typer.Typer(add_completion=False)


@app.command()
def version(*, as_json: AsJson = False) -> None:
    """Print the version."""
    number = installed_version("tinsmith")
    if as_json:
        print_json("version", {"version": number})
    else:
        typer.echo(number)
