"""One pickled message after another on a pipe between two processes of ours."""

from __future__ import annotations

import pickle
from typing import IO, Any


def read_message(stream: IO[bytes]) -> Any:
    """The next message; blocks until it is there.

    Raises:
        EOFError: no message comes any more. A process that is killed while it writes leaves a part of one: `pickle`
            calls that another kind of error than an end between two messages.
    """
    try:
        return pickle.load(stream)
    except (OSError, pickle.UnpicklingError) as error:
        raise EOFError("the other process is gone, in the middle of a message") from error
