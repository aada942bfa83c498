"""Who may read a checkpoint besides its own project: holders of a key of that project, shown as an access token.

Public checkpoints need no token. Not responsible for finding checkpoints (`checkpoints.py`).
"""

from __future__ import annotations

from schemas.errors import InvalidRequest
from store.database import Store
from store.keys import authenticate


async def readers(store: Store, project_id: str, token: str | None, *, field: str) -> tuple[str, ...]:
    """The projects with whose eyes a request reads: its own, and that of the token.

    Args:
        token: an API key of another project, given with the request.
        field: where it was given.

    Raises:
        InvalidRequest: the token is not a valid key.
    """
    if token is None:
        return (project_id,)
    key = await store.read(lambda db: authenticate(db, token))
    if key is None:
        raise InvalidRequest(f"{field} is not a valid API key", field=field)
    return (project_id, key.project_id)
