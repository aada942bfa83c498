"""How many samples of a project may wait: beyond that the edge asks clients to come back.

Responsible for the bound alone. Not responsible for order (`workers/sample_line.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import TooManyRequests
from workers.runtime_protocol import Runtime


class SampleRoom:
    """Places of waiting samples, `most` for each project on each base model. Those that run take none."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._arriving: Counter[tuple[str, str]] = Counter()
        """Samples that are being accepted, by base model and project."""

    @contextmanager
    def place(self, project_id: str, runtime: Runtime, held: int) -> Iterator[None]:
        """A place for a sample while it is accepted; afterwards it waits, or does not wait any more.

        Args:
            held: samples of the project that limits hold back.

        Raises:
            TooManyRequests: there is none. The SDK waits for a second or more then and sends the sample again, with
                the same `seq_id`, until it is taken; it also keeps fewer samples in submission for a while.
        """
        key = (runtime.name, project_id)
        waiting = runtime.samples_waiting(project_id) + held + self._arriving[key]
        if waiting >= self._most:
            raise TooManyRequests(
                f"{waiting} samples of this project wait already; at most {self._most} may",
                hint="send this one again after Retry-After seconds",
            )
        self._arriving[key] += 1
        try:
            yield
        finally:
            self._arriving[key] -= 1
            if not self._arriving[key]:
                del self._arriving[key]
