"""What a base model that cannot be loaded says, to clients and to the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import TinsmithError, Unavailable

_log = logging.getLogger(__name__)


@contextmanager
def reading_base_model() -> Iterator[None]:
    """Whatever goes wrong inside is `Unavailable`: libraries raise what they meet, with paths in it, so the details go
    to the log only. Errors of our own pass as they are."""
    try:
        yield
    except TinsmithError:
        raise
    except Exception as error:
        _log.exception("loading the base model failed")
        raise Unavailable(
            f"the base model could not be loaded ({type(error).__name__}); see the server's log"
        ) from None
