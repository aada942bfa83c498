"""Server-sent events as bytes. Not responsible for what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

KEEP_ALIVE = b": waiting\n\n"
"""A comment, which clients skip: it keeps proxies from closing a connection on which nothing happens."""
PAUSE = 10.0
"""Seconds without news after which a stream shows that it is alive."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
