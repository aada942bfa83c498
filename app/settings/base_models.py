"""How a base model is named, and where its files are."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

DEFAULT_BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?(:[A-Za-z0-9._-]+)?")

LOCAL = ("/", "~", ".")
"""How a path begins, as opposed to a hub id."""


class BaseModelSource(BaseModel):
    """One base model to serve: the name that clients use, and where its files are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    path: str | None = None
    tokenizer_id: str | None = None

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if value.startswith(LOCAL):
            raise ValueError(f"{value!r} is a folder without a name; write NAME=PATH, for example org/model={value}")
        if not _NAME.fullmatch(value) or len(value) > 128:
            raise ValueError(
                f"{value!r} is not a model name; write a name such as org/model, or NAME=PATH for a folder"
            )
        return value

    @property
    def source(self) -> str | None:
        """A local folder or a hub id; None for the built-in default model."""
        if self.path is not None:
            local = self.path.startswith(LOCAL)
            return str(Path(self.path).expanduser().absolute()) if local else self.path
        return None if self.name == DEFAULT_BASE_MODEL else self.name


def parse_model(text: str) -> dict[str, str]:
    """`NAME` or `NAME=PATH` as the fields of a `BaseModelSource`. Raises `ValueError` for a `=` without a path."""
    name, separator, path = text.partition("=")
    if separator and not path:
        raise ValueError(f"{text!r} has nothing after '='; write NAME or NAME=PATH")
    return {"name": name, "path": path} if separator else {"name": name}
