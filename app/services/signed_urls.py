"""Signed, expiring addresses of exported files, so that any HTTP client can fetch them without a key.

Responsible for signing and checking. Not responsible for which files exist (`checkpoints.py`) or for sending them
(`app/routes/exports.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode

from schemas.errors import NotFound
from store.files import read_private, replace_private

SECRET_BYTES = 32
LIFETIME = timedelta(hours=1)
"""How long an address works. Clients ask for new ones when less than five minutes are left."""


def load_secret(file: Path) -> bytes:
    """The server's signing secret (32 bytes), made on first use with mode 0600.

    A file of another length, which only a damaged disk leaves, is replaced: what was signed with it ends.
    """
    secret = read_private(file)
    if secret is None or len(secret) != SECRET_BYTES:
        secret = secrets.token_bytes(SECRET_BYTES)
        replace_private(file, secret)
    return secret


class SignedUrls:
    """Signs `(checkpoint id, file name, expiry)` with HMAC-SHA256.

    Args:
        secret: the server's signing secret.
        clock: the time, aware UTC.
    """

    def __init__(self, secret: bytes, clock: Callable[[], datetime]) -> None:
        self._secret = secret
        self._clock = clock

    def expiry(self) -> datetime:
        """When an address that is signed now ends, to the second."""
        return (self._clock() + LIFETIME).replace(microsecond=0)

    def sign(self, checkpoint_id: str, name: str, expires: datetime) -> str:
        """The path and query of one file, relative to the root of the API."""
        seconds = int(expires.timestamp())
        query = urlencode({"expires": seconds, "signature": self._signature(checkpoint_id, name, seconds)})
        return f"/files/{checkpoint_id}/{name}?{query}"

    def check(self, checkpoint_id: str, name: str, expires: int, signature: str) -> None:
        """Raise `NotFound` unless the signature is this server's, for exactly this file, and still valid."""
        expected = self._signature(checkpoint_id, name, expires)
        genuine = hmac.compare_digest(expected.encode(), signature.encode())
        if not genuine or self._clock().timestamp() >= expires:
            raise NotFound("no such file, or its address has expired", hint="ask for the file's address again")

    def _signature(self, checkpoint_id: str, name: str, expires: int) -> str:
        message = f"{checkpoint_id}\n{name}\n{expires}".encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()
