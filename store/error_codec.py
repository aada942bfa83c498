"""Errors as JSON and back, so that a failure survives a restart with its status, category and code.

Not responsible for how a client sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from schemas.errors import TinsmithError


def error_to_json(error: TinsmithError) -> dict[str, Any]:
    """The error's attributes and the names of its classes, most special first."""
    return {
        "classes": [cls.__name__ for cls in type(error).__mro__ if issubclass(cls, TinsmithError)],
        "message": error.message,
        "field": error.field,
        "hint": error.hint,
        "code": error.code,
    }


def error_from_json(data: Mapping[str, Any]) -> TinsmithError:
    """The error again; a class that this process does not know becomes its nearest known ancestor."""
    known = {cls.__name__: cls for cls in _family(TinsmithError)}
    cls = next((known[name] for name in data["classes"] if name in known), TinsmithError)
    return cls(data["message"], field=data["field"], hint=data["hint"], code=data["code"])


def _family(cls: type[TinsmithError]) -> Iterator[type[TinsmithError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _family(child)
