"""What the themes of settings have in common: their base class, types of fields, and forms of values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from schemas.limits import SLOWEST

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=SLOWEST, allow_inf_nan=False)]


class Theme(BaseModel):
    """A part of the settings. Its checks are compiled when settings are first made: help needs none."""

    model_config = ConfigDict(defer_build=True)

    heading: ClassVar[str]
    """In the documentation."""


def split(value: object) -> object:
    """Text from the environment: a JSON list, or items separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"{value!r} begins like a JSON list but is not one ({error})") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def absolute(path: Path | None) -> Path | None:
    """The path without `~`, from the root."""
    return None if path is None else path.expanduser().absolute()
