"""Which methods of a worker may be called over a worker group, and how a call reaches the ranks.

A group refuses every method that is not registered here, so a worker's helpers are never reachable from outside its
process. Not responsible for transport: `workers/local.py` carries the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from schemas.errors import EngineFailure, TinsmithError

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__tinsmith_dispatch__"


class Dispatch(Enum):
    """How the ranks take part in a call."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; `merge` makes one answer of theirs.

    Batches too: who computes which datum is decided turn by turn, and every rank needs all of a batch to check it and
    to know what the others do. A datum costs about 20 bytes per token on its way and billions of operations there.
    """


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


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one rank answered: a value or an error."""

    value: Any = None
    error: TinsmithError | None = None


def merge(answers: Sequence[RankAnswer]) -> Any:
    """The answer of a call from those of its ranks, in order of rank.

    The value of rank 0, which alone sends one. Raises the error of the lowest rank that has one: an engine sees to it
    that a change is made on all ranks or on none, and what only rank 0 does (writing files) only rank 0 can fail at.
    """
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return answers[0].value


def invoke(worker: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a registered method of a worker; raises `EngineFailure` for any other name."""
    if method not in registered_methods(type(worker)):
        raise EngineFailure(f"the worker has no operation {method!r}")
    return getattr(worker, method)(*args, **kwargs)
