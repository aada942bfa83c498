"""Which methods of a worker may be called over a worker group, and how a call reaches the ranks.

A group refuses every method that is not registered here, so a worker's helpers are never reachable from outside its
process. Not responsible for transport: `workers/local.py` carries the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from schemas.errors import EngineFailure

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__tinsmith_dispatch__"


class Dispatch(Enum):
    """How the ranks take part in a call."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; rank 0's value is the answer."""


def register(dispatch: Dispatch) -> Callable[[F], F]:
    """Mark a worker method as callable over the group."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, dispatch)
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Dispatch]:
    """The methods of a worker class that a group may call, inherited ones included."""
    found: dict[str, Dispatch] = {}
    for name in dir(cls):
        dispatch = getattr(getattr(cls, name), _ATTRIBUTE, None)
        if isinstance(dispatch, Dispatch):
            found[name] = dispatch
    return found


def invoke(worker: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a registered method of a worker; raises `EngineFailure` for any other name."""
    if method not in registered_methods(type(worker)):
        raise EngineFailure(f"the worker has no operation {method!r}")
    return getattr(worker, method)(*args, **kwargs)
