"""`tinsmith openapi`: the description of the HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.output import fail

app = typer.Typer(add_completion=False)


@app.command()
def openapi(
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("openapi.yaml"),
) -> None:
    """Write the OpenAPI description of this version as YAML."""
    from app.main import create_app
    from app.openapi import to_yaml
    from app.settings import Settings

    try:
        output.write_text(to_yaml(create_app(Settings()).openapi()), encoding="utf-8")
    except OSError as error:
        raise fail(f"{output} cannot be written ({error.strerror})", "choose another file with --output") from None
    typer.echo(f"wrote {output}")
