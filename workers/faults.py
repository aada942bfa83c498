"""Turns whatever a worker raised into something that a client may read.

Errors of the tree pass unchanged. Everything else becomes a generic failure: its text may hold paths and prompts, so
only the log gets it.
"""

from __future__ import annotations

import logging

from schemas.errors import EngineFailure, OutOfMemory, TinsmithError

_log = logging.getLogger("tinsmith.worker")


def to_tinsmith_error(error: BaseException, doing: str) -> TinsmithError:
    """The error to send on; logs the traceback of the unexpected ones in this process. `doing` names the operation."""
    if isinstance(error, TinsmithError):
        return error
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        _log.warning("out of memory in %s", doing, exc_info=error)
        return OutOfMemory(
            f"there was not enough memory for {doing}",
            hint="send fewer or shorter datums at a time, or use a smaller rank",
        )
    _log.error("unexpected failure in %s", doing, exc_info=error)
    return EngineFailure(f"the worker failed unexpectedly in {doing}", hint="the server's log has the details")
