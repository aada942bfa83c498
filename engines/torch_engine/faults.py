"""What becomes of an exception that nobody expected: the log gets it, the client a failure that names nothing."""

from __future__ import annotations

import logging

from schemas.errors import EngineFailure

_log = logging.getLogger(__name__)


def unexpected(error: Exception, doing: str) -> EngineFailure:
    """Log the error with its traceback; `doing` names the work in the client's words."""
    _log.error("unexpected failure in %s", doing, exc_info=error)
    return EngineFailure(f"the engine failed unexpectedly in {doing}", hint="the server's log has the details")
