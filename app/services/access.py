"""Who may read a checkpoint besides its own project: holders of a key of that project, shown as an access token.

Public checkpoints need no token. Not responsible for finding checkpoints (`checkpoints.py`).
"""

from __future__ import annotations

from app.permissions import held
from schemas.errors import InvalidRequest
from schemas.roles import Permission
from store.database import Store
from store.keys import authenticate

USES_WEIGHTS: frozenset[Permission] = frozenset({"train", "sample", "checkpoints"})
"""One of these lets the holder of a key use saved weights of the key's project."""


async def readers(store: Store, project_id: str, token: str | None, *, field: str) -> tuple[str, ...]:
    """The projects with whose eyes a request reads: its own, and that of the token.

    Args:
        token: an API key of another project, given with the request.
        field: where it was given.

    Raises:
        InvalidRequest: the token is not a valid key, or one that may not use weights.
    """
    if token is None:
        return (project_id,)
    key = await store.read(lambda db: authenticate(db, token))
    if key is None:
        raise InvalidRequest(f"{field} is not a valid API key", field=field)
    if not held(key.role, key.scopes) & USES_WEIGHTS:
        raise InvalidRequest(
            f"{field} is a key that may not use the weights of its project: it has none of the permissions "
            f"{', '.join(sorted(USES_WEIGHTS))}",
            field=field,
        )
    return (project_id, key.project_id)
