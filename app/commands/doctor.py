"""`tinsmith doctor`: what is wrong with a data folder or with this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.output import FAILED, SETTINGS_HELP, USAGE, fail, print_json, working

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    *,
    data_dir: Annotated[Path | None, typer.Option(help="The data folder to look at; a copy of one, too.")] = None,
    port: Annotated[
        str | None, typer.Option(help="Port that should be free, if not the configured one; 0: any.")
    ] = None,
    base_model: Annotated[list[str] | None, typer.Option(help="Base model, NAME or NAME=PATH, as for serve.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's TOML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for other programs.")] = False,
) -> None:
    """Check a data folder and this machine; changes nothing, and works beside a running server.

    Every checkpoint and every stored body is read and compared with its checksum. Ends with 0 if all is well (warnings
    do not count) and with 1 if something is not. Settings come from --config and the environment, as for serve.
    """
    given = {"data_dir": data_dir, "port": port, "base_model": base_model or None}
    from app.settings import SettingsError, load_settings

    try:
        settings = load_settings(given, config=config)
    except SettingsError as error:
        raise fail(str(error), error.remedy or SETTINGS_HELP, USAGE) from None
    from app.checks import as_json as to_json
    from app.checks import as_table, healthy
    from app.doctor import check_data_folder
    from app.doctor_machine import check_machine
    from store.read_only import running_server

    with working(f"looking into {settings.data_dir}") as tell:
        checks = check_data_folder(settings.data_dir, tell, database_url=settings.database_url)
        tell("looking at this machine")
        checks += check_machine(settings, running_server(settings.data_dir))
    if as_json:
        print_json("doctor", to_json(checks, data_dir=str(settings.data_dir)))
    else:
        typer.echo(f"data folder {settings.data_dir}\n{as_table(checks)}")
    raise typer.Exit(0 if healthy(checks) else FAILED)
