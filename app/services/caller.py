"""Which key the request that is being handled was made with. Set where requests are let in (`app/auth.py`), so that no
route can forget to pass it on; tasks that a request starts inherit it."""

from __future__ import annotations

from contextvars import ContextVar

_key: ContextVar[str | None] = ContextVar("calling_key", default=None)


def note_caller(key_id: str) -> None:
    """The request that is handled in this context was made with this key."""
    _key.set(key_id)


def calling_key() -> str | None:
    """The id of the key; None outside requests."""
    return _key.get()
