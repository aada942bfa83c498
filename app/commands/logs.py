"""`tinsmith logs`: the end of the server's log, if it is kept in a file."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from app.commands.output import SETTINGS_HELP, STOPPED, USAGE, fail, plain

app = typer.Typer(add_completion=False)

HELP = "say with --data-dir where the server keeps its data, or look where its log is besides:"
HOW = """\
  in a terminal           it is what `tinsmith serve` writes to stderr
  docker compose          docker compose logs tinsmith
  Kubernetes              kubectl logs deploy/tinsmith
  systemd                 journalctl --user-unit tinsmith, or without --user for the system's
  from the next start on  tinsmith serve --log-file FILE"""
FOLLOW_SECONDS = 0.5


@app.command()
def logs(
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written; Ctrl-C ends it.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="The server's data folder.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's TOML file.")] = None,
) -> None:
    """The end of the server's log. Settings come from --config and the environment, as for serve."""
    from app.settings import SettingsError, load_settings

    try:
        settings = load_settings({"data_dir": data_dir}, config=config)
    except SettingsError as error:
        raise fail(str(error), error.remedy or SETTINGS_HELP, USAGE) from None
    file = settings.own_log_file
    if file is None or not file.is_file():
        exit_ = fail(
            "the server keeps no log in a file" if file is None else f"there is no log: {file} is missing", HELP
        )
        typer.echo(HOW, err=True)
        raise exit_
    try:
        _show(file, lines, follow)
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    except BrokenPipeError:  # stdout, which `head` has closed: not the file
        raise
    except OSError as error:
        raise fail(f"{file} cannot be read ({error.strerror})", "ask who runs the server; the file is theirs") from None


def _show(file: Path, lines: int, follow: bool) -> None:
    opened = file.open(encoding="utf-8", errors="replace")
    try:
        for line in deque(opened, maxlen=lines) if lines else opened.read() and ():
            typer.echo(plain(line.rstrip("\n")))
        while follow:
            line = opened.readline()
            if line:
                typer.echo(plain(line.rstrip("\n")))
                continue
            time.sleep(FOLLOW_SECONDS)
            if file.exists() and file.stat().st_ino != os.fstat(opened.fileno()).st_ino:  # the log was begun anew
                opened.close()
                opened = file.open(encoding="utf-8", errors="replace")
    finally:
        opened.close()
