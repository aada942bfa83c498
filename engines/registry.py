"""The engines by name. An engine's module (and the library behind it) is imported only when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from engines.base import BaseEngine
from schemas.errors import InvalidRequest, Unavailable

ENGINES: Mapping[str, str] = {"torch": "engines.torch_engine.engine:TorchEngine"}
"""Engine name -> "module:class"."""


def get_engine(name: str) -> type[BaseEngine]:
    """The engine class of that name, usable on this machine.

    Raises `InvalidRequest` for an unknown name and `Unavailable` (saying what is missing) if its libraries are not
    installed.
    """
    target = ENGINES.get(name)
    if target is None:
        raise InvalidRequest(f"unknown engine {name!r}; known: {', '.join(sorted(ENGINES))}", field="engine")
    module, _, attribute = target.partition(":")
    try:
        engine = cast("type[BaseEngine]", getattr(importlib.import_module(module), attribute))
    except ModuleNotFoundError as error:
        raise Unavailable(f"engine {name!r} needs the Python package {error.name!r}, which is not installed") from error
    engine.check()
    return engine
