"""Short-lived tokens in place of API keys: made from a key, read back on every request.

A token is a JWT signed with HMAC-SHA256 by a secret that never leaves this server's data folder. It names the key that
it was made from, and is worth nothing once that key is revoked or has expired: the caller looks the key up again.
Not responsible for the look-up nor for HTTP (`app/auth.py`, `app/routes/account.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from store.records import KeyRecord

ALGORITHM = "HS256"
"""The only one: a token that names another (or none) is refused."""
ISSUER = "tinsmith"
TYPE = "tinsmith-access"
"""`typ` of the header: no other signed text of this server can be taken for a token."""


def user_urn(project_id: str) -> str:
    """The one user of a project, as clients are told: keys are credentials, not people."""
    return f"tml:user:{project_id}"


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """Whose token it is, the key (its id) that must still be valid, and when the token ends."""

    project_id: str
    key_id: str
    until: datetime


class Tokens:
    """Makes and reads tokens.

    Args:
        secret: the signing secret, 32 random bytes.
        lifetime: seconds that a token is valid.
        clock: the time, aware UTC.
    """

    def __init__(self, secret: bytes, lifetime: float, clock: Callable[[], datetime]) -> None:
        self._secret = secret
        self._lifetime = timedelta(seconds=lifetime)
        self._clock = clock

    def issue(self, key: KeyRecord, *, until: datetime | None = None) -> str:
        """A token for the holder of `key`. It ends with the key, if that ends sooner, and at `until` at the latest:
        a token that is exchanged for another one gives its holder no more time."""
        # Imported here: servers whose clients send plain keys, and `--help`, do without.
        import jwt

        now = self._clock()
        ends = min(end for end in (now + self._lifetime, key.expires_at, until) if end is not None)
        claims = {
            "iss": ISSUER,
            "iat": int(now.timestamp()),
            "exp": int(ends.timestamp()),
            "sub": user_urn(key.project_id),
            "org_id": key.project_id,
            "email": "",
            "key_id": key.key_id,
        }
        return jwt.encode(claims, self._secret, algorithm=ALGORITHM, headers={"typ": TYPE})

    def read(self, token: str) -> TokenIdentity | None:
        """Whose token it is; None unless it is one of this server's, unaltered, and still valid."""
        import jwt

        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._secret,
                algorithms=[ALGORITHM],
                issuer=ISSUER,
                # Our clock decides about the end, so that a test can move it.
                options={"require": ["exp", "iat", "iss", "sub"], "verify_exp": False, "verify_iat": False},
            )
            typed = jwt.get_unverified_header(token).get("typ") == TYPE  # what the signature covers
        except (jwt.InvalidTokenError, ValueError, UnicodeError):
            return None
        project_id, key_id, ends = claims.get("org_id"), claims.get("key_id"), claims.get("exp")
        if not typed or not isinstance(project_id, str) or not isinstance(key_id, str) or not isinstance(ends, int):
            return None
        try:
            until = datetime.fromtimestamp(ends, UTC)
        except (ValueError, OverflowError, OSError):
            return None
        return TokenIdentity(project_id, key_id, until) if self._clock() < until else None
