"""Who may use a checkpoint besides its own project: whoever shows a key of that project, as an access token.

Public checkpoints need no token. Not responsible for finding checkpoints (`checkpoints.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from app.permissions import held
from schemas.errors import InvalidRequest
from schemas.roles import Permission
from store.database import Store
from store.keys import authenticate


class AccessTokens:
    """Opens the project of an access token to a request.

    Args:
        used: told the id of a key each time that it is shown as a token.
    """

    def __init__(self, store: Store, used: Callable[[str], None]) -> None:
        self._store = store
        self._used = used

    async def readers(self, project_id: str, token: str | None, *, field: str, needs: Permission) -> tuple[str, ...]:
        """The projects with whose eyes a request reads: its own, and that of the token.

        Args:
            token: an API key of another project, given with the request.
            field: where it was given.
            needs: what the token's own holder needs in order to do the same: a key opens no more to others.

        Raises:
            InvalidRequest: the token is not a valid key, or one that may not do this itself.
        """
        if token is None:
            return (project_id,)
        key = await self._store.read(lambda db: authenticate(db, token))
        if key is None:
            raise InvalidRequest(f"{field} is not a valid API key", field=field)
        self._used(key.key_id)
        if needs not in held(key.role, key.scopes):
            raise InvalidRequest(
                f"{field} is a key that may not use the weights of its project for this: it lacks the permission "
                f"{needs}",
                field=field,
                hint=f"ask the owner of the checkpoint for a key with the permission {needs}, or for a copy of it",
            )
        return (project_id, key.project_id)
