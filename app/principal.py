"""Who a request is from: its tenant, its key, and what that key may do. Not responsible for finding out (`auth.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from schemas.roles import Permission


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant of a request, and the key that it used (an id, never the key).

    `until` is when the token ends that stood for the key; None if the key itself was sent. `ends` is when the key ends.
    Without `permissions` it may do nothing but say who it is.
    """

    project_id: str
    key_id: str
    until: datetime | None = None
    role: str = ""
    permissions: frozenset[Permission] = frozenset()
    scopes: tuple[str, ...] | None = None
    """What the key was narrowed to; None if it was not."""
    ends: datetime | None = None
