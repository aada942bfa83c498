"""Names of roles and permissions, and which role is the lesser of two. What a role may do: `app/permissions.py`."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["read-only", "member", "owner", "admin"]
"""What somebody is in a project. `admin` is more: an operator of the whole server."""
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do all that the ones before it may."""

Permission = Literal["read", "train", "sample", "checkpoints", "keys", "admin"]
"""What a route can need, and a scope of a key can name."""
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)


def lesser(one: str, other: str) -> str:
    """The role of two that may do less; a text that is no role may do nothing, so it is the lesser one."""
    for role in (one, other):
        if role not in ROLES:
            return role
    return min(one, other, key=ROLES.index)
