"""`tinsmith serve`: every setting is an option, built from `app.settings.Settings`, so that the two cannot differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from app.commands.output import SETTINGS_HELP, USAGE, fail
from app.settings import Settings, SettingsError, check_folders, load_settings
from app.settings_docs import default_text, kind_text, option_name

LOCAL_RAY = "local"

app = typer.Typer(add_completion=False)


def _repeatable(info: FieldInfo) -> bool:
    return get_origin(info.annotation) is tuple


def _option(name: str, info: FieldInfo) -> inspect.Parameter:
    """The option of one setting. Values stay text: `Settings` checks them, whatever layer they come from."""
    kind_of_value = kind_text(info)
    choices = f" One of {kind_of_value.replace('|', ', ')}." if "|" in kind_of_value else ""
    description = (info.description or "").replace("`", "")
    option = typer.Option(
        option_name(name),
        help=f"{description}{choices} Default: {default_text(info)}",
        metavar="TEXT" if choices else kind_of_value,
        show_default=False,
    )
    kind: Any = list[str] | None if _repeatable(info) else str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(config, **values)` one option for each setting."""
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                "--config", metavar="FILE", help="TOML file with any of these settings as keys (max_rank = 64)."
            ),
        ],
    )
    parameters = [config, *(_option(name, info) for name, info in Settings.model_fields.items())]
    signature = inspect.Signature(parameters)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


class _Serve(TyperCommand):
    """`serve`, whose option --ray may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        return super().parse_args(ctx, with_local_ray(args))


def with_local_ray(args: list[str]) -> list[str]:
    """The arguments, with the value "local" behind each --ray that has none."""
    given: list[str] = []
    for argument, following in pairwise([*args, "--"]):
        given.append(argument)
        if argument == "--ray" and following.startswith("-"):
            given.append(LOCAL_RAY)
    return given


@app.command(cls=_Serve)
@_with_settings
def serve(*, config: Path | None = None, **values: Any) -> None:
    """Start the server and keep it in the foreground; Ctrl-C stops it, a second Ctrl-C at once.

    Every option is also an environment variable (--max-rank is TINSMITH_MAX_RANK) and a key of the file that --config
    or TINSMITH_CONFIG names. The command line comes before the environment, the environment before the file.
    """
    given = {name: value for name, value in values.items() if value not in (None, [], ())}
    try:
        settings = load_settings(given, config=config)
        check_folders(settings)
    except SettingsError as error:
        raise fail(str(error), error.remedy or SETTINGS_HELP, USAGE) from None
    from app.serve import run

    raise typer.Exit(run(settings))
