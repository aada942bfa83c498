"""The command `tinsmith`. Parses, delegates, and turns failures into one clear line and an exit code.

The options of `serve` are built from `app.settings.Settings`, so the two cannot differ. The server itself is imported
only when a command needs it: help answers at once.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from app import models_cli
from app.settings import Settings, SettingsError, check_folders, load_settings
from app.settings_docs import default_text, kind_text, option_name

FAILED = 1
LOCAL_RAY = "local"
USAGE = 2

app = typer.Typer(
    name="tinsmith",
    help="A self-hosted fine-tuning API that speaks Tinker's protocol.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # boxes cut long option names in a narrow terminal
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `tinsmith` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("tinsmith"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A self-hosted fine-tuning API that speaks Tinker's protocol."""


def fail(message: str, code: int = FAILED) -> typer.Exit:
    """Say what is wrong on stderr; returns the exit to raise."""
    typer.echo(message, err=True)
    return typer.Exit(code)


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
    for argument, following in zip(args, [*args[1:], "--"], strict=True):
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
        raise fail(str(error), USAGE) from None
    from app.serve import run

    raise typer.Exit(run(settings))


@app.command()
def doctor(
    *,
    data_dir: Annotated[Path | None, typer.Option(help="The data folder to look at; a copy of one, too.")] = None,
    port: Annotated[str | None, typer.Option(help="Port that should be free, if not the configured one.")] = None,
    base_model: Annotated[list[str] | None, typer.Option(help="Base model, NAME or NAME=PATH, as for serve.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's TOML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for other programs.")] = False,
) -> None:
    """Check a data folder and this machine; changes nothing, and works beside a running server.

    Every checkpoint and every stored body is read and compared with its checksum. Ends with 0 if all is well (warnings
    do not count) and with 1 if something is not. Settings come from --config and the environment, as for serve.
    """
    given = {"data_dir": data_dir, "port": port, "base_model": base_model or None}
    try:
        settings = load_settings(given, config=config)
    except SettingsError as error:
        raise fail(str(error), USAGE) from None
    from app.checks import as_json as to_json
    from app.checks import as_table, healthy
    from app.doctor import check_data_folder
    from app.doctor_machine import check_machine
    from store.read_only import running_server

    checks = check_data_folder(settings.data_dir, _tell, database_url=settings.database_url)
    checks += check_machine(settings, running_server(settings.data_dir))
    if as_json:
        typer.echo(json.dumps(to_json(checks, data_dir=str(settings.data_dir)), indent=2))
    else:
        typer.echo(f"data folder {settings.data_dir}\n{as_table(checks)}")
    raise typer.Exit(0 if healthy(checks) else FAILED)


@app.command()
def backup(
    dest: Annotated[Path, typer.Argument(help="Folder to make; an empty one may be there already.")],
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
        done = back_up(
            _data_folder(data_dir), dest.expanduser(), links=not copy, tell=lambda line: typer.echo(line, err=True)
        )
    except TinsmithError as error:
        hint = f" ({error.hint})" if error.hint else ""
        raise fail(f"no backup was made: {error.message}{hint}") from None
    for name in done.missing:
        typer.echo(f"missing or damaged in the data folder itself: {name}", err=True)
    typer.echo(f"{dest}: {describe(done)}")
    raise typer.Exit(FAILED if done.missing else 0)


@app.command()
def demo(
    *,
    url: Annotated[
        str, typer.Option(help="The running server. (variable TINSMITH_URL)", envvar="TINSMITH_URL", show_envvar=False)
    ] = "http://127.0.0.1:8410",
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key; without it the development key in the data folder. (variable TINSMITH_KEY)",
            envvar="TINSMITH_KEY",
            show_envvar=False,
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The server's data folder, where dev_key is.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model; without it the first one that the server has.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")] = 1e-3,
    rank: Annotated[int, typer.Option(min=1, help="LoRA rank.")] = 16,
    output: Annotated[Path, typer.Option(help="Where to put the adapter.")] = Path("quickstart-adapter"),
) -> None:
    """Fine-tune a model on a few poems, on a server that is running (examples/quickstart.py)."""
    quickstart = _load_quickstart()
    key = api_key or _development_key(data_dir)
    model = model or _first_model(url, key)
    import tinker

    try:
        quickstart.run(
            base_url=url,
            api_key=key,
            model=model,
            steps=steps,
            learning_rate=learning_rate,
            rank=rank,
            output=output,
        )
    except tinker.TinkerError as error:
        raise fail(f"the demo failed: {error}") from None


@app.command()
def tokenizer(
    name: Annotated[str, typer.Argument(help="Name of the base model, org/name, as the server serves it.")],
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder of the model or its tokenizer; without it the built-in model in the data folder."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The server's data folder.")] = None,
) -> None:
    """Let clients on this machine load a base model's tokenizer by its name, without the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from app.tokenizers import install
    from engines.base_models import built_in_folder

    try:
        installed = install(name, folder or built_in_folder(_data_folder(data_dir)), Path(HF_HUB_CACHE))
    except (OSError, ValueError) as error:
        raise fail(str(error)) from None
    typer.echo(f"installed {installed}")


app.add_typer(models_cli.app, name="models")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(installed_version("tinsmith"))


@app.command()
def openapi(
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("openapi.yaml"),
) -> None:
    """Write the OpenAPI description of this version as YAML."""
    from app.main import create_app
    from app.openapi import to_yaml

    output.write_text(to_yaml(create_app(Settings()).openapi()), encoding="utf-8")
    typer.echo(f"wrote {output}")


def _tell(line: str) -> None:
    """A line of progress, for who is watching."""
    if sys.stderr.isatty():
        typer.echo(line, err=True)


def _data_folder(data_dir: Path | None) -> Path:
    if data_dir is None:
        configured = os.environ.get("TINSMITH_DATA_DIR")
        data_dir = Path(configured) if configured else Settings().data_dir
    return data_dir.expanduser()


def _development_key(data_dir: Path | None) -> str:
    file = _data_folder(data_dir) / "dev_key"
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise fail(f"no API key: {file} cannot be read ({error.strerror}); give --api-key or --data-dir") from None


def _first_model(url: str, key: str) -> str:
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/get_server_capabilities", headers={"X-API-Key": key}, timeout=10)
    except httpx.HTTPError:
        raise fail(f"no server answers at {url}; start one with `tinsmith serve`") from None
    if answer.status_code != 200:
        raise fail(f"the server at {url} answered {answer.status_code}: {answer.text[:300]}")
    return str(answer.json()["supported_models"][0]["model_name"])


def _load_quickstart() -> ModuleType:
    """The example beside the source code: it is not part of the installed package."""
    file = Path(__file__).parents[1] / "examples" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("tinsmith_quickstart", file)
    if not file.exists() or spec is None or spec.loader is None:
        raise fail("the demo needs the project's folder: examples/quickstart.py is not there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise fail(f"the demo needs the client: pip install 'tinsmith[client]' ({error.name} is missing)") from None
    return module
