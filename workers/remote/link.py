"""The way from an edge to the server of a runtime: what a transport has to provide.

Not responsible for order or repetition: `workers/remote/edge.py` numbers what it sends and sends it again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from schemas.errors import TinsmithError


class LinkBroken(Exception):
    """The server cannot be reached over this stream or call; another try may work."""


class Link(Protocol):
    """One runtime's server, wherever it is, and whichever of its incarnations lives now."""

    async def open(self) -> None:
        """Make sure that there is a server, or soon will be; bounded in time. Raises a `TinsmithError` if there can be
        none, for example because the machine has no room for it."""
        ...

    def events(self, hello: bytes) -> AsyncIterator[bytes]:
        """Listen: a packed `Welcome`, then packed `Events`. Raises `LinkBroken` when the stream ends."""
        ...

    async def send(self, frame: bytes) -> bool:
        """Hand over a packed `Frame`; False if its attachment is not known (any more). Raises `LinkBroken`."""
        ...

    async def lost(self) -> TinsmithError | None:
        """Asked after a break: why there will be no server any more; None if there is one or one is coming."""
        ...

    async def close(self) -> None:
        """The edge needs the server no longer: end it, if nobody else uses it."""
        ...
