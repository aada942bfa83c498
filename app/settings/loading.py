"""The settings, layered from command line, environment and file; and words for what cannot be used."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from app.settings.base_models import LOCAL, BaseModelSource
from app.settings.model import ENV_PREFIX, Settings

OTHER_ENV = frozenset({"TINSMITH_CONFIG", "TINSMITH_URL", "TINSMITH_KEY", "TINSMITH_FAIL_AT"})
"""Variables with our prefix that are not settings of the server: the config file, what `tinsmith demo` reads, and where
a test of crashes lets a process die."""


class SettingsError(Exception):
    """The configuration cannot be used. The text has one line for each problem, with where the value came from.

    Args:
        remedy: what to do about it, if it is more than to look the setting up.
    """

    def __init__(self, text: str, remedy: str | None = None) -> None:
        super().__init__(text)
        self.remedy = remedy


def load_settings(
    cli: Mapping[str, Any] | None = None,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Layer command line over environment over file over defaults.

    Args:
        cli: options given on the command line, by field name; None values count as not given.
        config: the TOML file; without it `TINSMITH_CONFIG` names one, if set.
        environ: the environment to read; default is that of the process.

    Raises:
        SettingsError: for an unreadable file, an unknown key, or a value that is not accepted.
    """
    env = os.environ if environ is None else environ
    layers: list[tuple[str, dict[str, Any]]] = [("default", {})]
    file = config or (Path(env["TINSMITH_CONFIG"]) if env.get("TINSMITH_CONFIG") else None)
    if file is not None:
        layers.append((f"file {file}", _read_file(file)))
    layers.append(("environment", _read_env(env)))
    layers.append(("command line", {key: value for key, value in (cli or {}).items() if value is not None}))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, values in layers:
        merged.update(values)
        origin.update(dict.fromkeys(values, name))
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise SettingsError(_explain(error, origin)) from None


def check_folders(settings: Settings) -> None:
    """Raise `SettingsError` for a base model whose folder is missing: a worker would find out only after it started."""
    for model in settings.base_model:
        missing_folder(model)


def missing_folder(model: BaseModelSource) -> None:
    """Raise `SettingsError` if a base model has a folder that is not there."""
    if model.path is not None and model.path.startswith(LOCAL) and not Path(model.source or "").is_dir():
        raise SettingsError(
            f"base_model {model.name}: there is no folder {model.path!r}",
            "give the folder of a model with config.json and *.safetensors, or its id on the hub, org/name",
        )


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"config file {file}: {error.strerror or error}", "name another one with --config or TINSMITH_CONFIG"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"config file {file} is not valid TOML: {error}", "write a line for each setting, such as max_rank = 64"
        ) from None


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + name.upper(): name for name in Settings.model_fields}
    for variable in sorted(env):
        if variable.startswith(ENV_PREFIX) and variable not in known and variable not in OTHER_ENV:
            raise SettingsError(
                f"environment variable {variable} is not a setting{_closest(variable, known)} "
                "(on Kubernetes, `enableServiceLinks: false` keeps it from setting variables of its own)"
            )
    source = EnvSettingsSource(Settings)
    source.env_vars = {key.lower(): value for key, value in env.items() if value}  # empty means not given
    try:
        return source()
    except ValueError as error:
        raise SettingsError(f"environment: {error}") from None


def _closest(word: str, known: Mapping[str, str] | list[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else ""


def _explain(error: ValidationError, origin: Mapping[str, str]) -> str:
    lines: list[str] = []
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0]) if item["loc"] else "settings"
        where = origin.get(name, "default")
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
            lines.append(f"{name} ({where}) is not a setting{_closest(name, list(Settings.model_fields))}")
            continue
        if item["type"] == "too_short" and len(error.errors()) > 1:
            continue  # only because the entries that are named on the other lines were left out
        message = item["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        lines.append(f"{path} = {_short(item['input'])} ({where}): {message}")
    return "\n".join(lines)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
