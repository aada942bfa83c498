"""`tinsmith tokenizer`: a base model's tokenizer under its name, for clients on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.client import data_folder
from app.commands.output import fail

app = typer.Typer(add_completion=False)


@app.command()
def tokenizer(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the base model, org/name, as the server serves it.")
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="Folder of the model or its tokenizer; without it the built-in model in the data folder.",
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The server's data folder.")] = None,
) -> None:
    """Let clients on this machine load a base model's tokenizer by its name, without the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from app.tokenizers import install
    from engines.base_models import built_in_folder

    try:
        installed = install(name, folder or built_in_folder(data_folder(data_dir)), Path(HF_HUB_CACHE))
    except (OSError, ValueError) as error:
        raise fail(str(error), "give the folder of the model, or of its tokenizer, as the second argument") from None
    typer.echo(f"installed {installed}")
