"""`tinsmith backup`: a consistent copy of a data folder, while its server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.client import data_folder
from app.commands.output import FAILED, fail, warn, working

app = typer.Typer(add_completion=False)


@app.command()
def backup(
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to make; an empty one may be there already.")],
    *,
    data_dir: Annotated[Path | None, typer.Option(help="The data folder to copy.")] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy every file, also where a hard link would do (same disk).")
    ] = False,
) -> None:
    """Copy a data folder to DEST, consistently, while its server runs.

    The copy is a data folder: `tinsmith serve --data-dir DEST` opens it, and `tinsmith doctor --data-dir DEST` checks
    it. On the same disk files are hard-linked, which takes no time and no room, but does not help against a failing
    disk; --copy, or a DEST on another disk, does. It holds the server's keys: keep it as safe as the data folder.
    """
    from app.backup import back_up, describe
    from schemas.errors import TinsmithError

    try:
        with working(f"copying {data_folder(data_dir)}") as tell:
            done = back_up(data_folder(data_dir), dest.expanduser(), links=not copy, tell=tell)
    except TinsmithError as error:
        remedy = error.hint or "see that DEST can be made and its disk has room"
        raise fail(f"no backup was made: {error.message}", remedy) from None
    for name in done.missing:
        warn(f"missing or damaged in the data folder itself: {name}")
    typer.echo(f"{dest}: {describe(done)}")
    raise typer.Exit(FAILED if done.missing else 0)
