"""What needs no key: signs of life, signed files, and the pages that a browser shows, which are the same for everybody.

Everything else does, whether a route exists there or not.
"""

from __future__ import annotations

from collections.abc import Collection

DOCS_PATHS = frozenset(
    {"/openapi.json", "/docs", "/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"}
)
"""The description of the API, and the page that shows it."""
PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz", "/api/v1/readyz"}) | DOCS_PATHS
"""What needs no key. Everything else does, whether a route exists there or not."""

PUBLIC_PREFIX = "/api/v1/files/"
"""Exported files: their addresses carry a signature that expires instead of a key."""

CONSOLE_PATHS = frozenset({"/", "/console", "/sessions", "/training_runs", "/checkpoints", "/keys", "/playground"})
CONSOLE_PREFIXES = ("/console/", "/sessions/", "/training_runs/", "/checkpoints/", "/keys/")
"""The files of the web console and the short addresses of its pages: the same for everybody, and nothing of anybody."""


def is_public(path: str, also: Collection[str] = ()) -> bool:
    """Whether `path` needs no key; `also` are paths that need none because the settings say so."""
    return path in also or path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX) or is_page(path)


def is_page(path: str) -> bool:
    """Whether `path` is a file for browsers, the same for everybody: of the console or of the API's description."""
    return path in CONSOLE_PATHS | DOCS_PATHS or path.startswith(CONSOLE_PREFIXES)
