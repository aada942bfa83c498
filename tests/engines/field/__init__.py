"""Engines with an environment of their own: each is tested inside it (`make test-engines`), and skipped elsewhere."""

from __future__ import annotations

import pytest

from engines.registry import get_engine
from schemas.errors import Unavailable


def needs(engine: str) -> pytest.MarkDecorator:
    """Skips, with the engine's own reason, where the engine cannot run."""
    try:
        get_engine(engine)
    except Unavailable as error:
        return pytest.mark.skipif(True, reason=f"engine {engine} was NOT tested here: {error.message} ({error.hint})")
    return pytest.mark.skipif(False, reason="")
