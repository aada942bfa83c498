"""How far the operations of each training run have come, as the edge needs it to bring them to a new server.

Pure: no tasks, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.errors import TinsmithError


@dataclass(slots=True)
class Place:
    """One open training run. `next_seq` is the first seq_id that was not in line yet: all before it were submitted,
    refused, or given up by the server. `refused` are those from there on that were refused."""

    next_seq: int = 0
    refused: set[int] = field(default_factory=set)
    error: TinsmithError | None = None
    """Why nothing of it can run any more: it was never created, or is lost."""
    _seen: set[int] = field(default_factory=set)

    def note(self, seq_id: int, *, refused: bool = False) -> None:
        """A request with this number was submitted, or was refused."""
        if seq_id < self.next_seq:
            return
        self._seen.add(seq_id)
        if refused:
            self.refused.add(seq_id)
        else:
            self.refused.discard(seq_id)
        self._advance()

    def passed(self, seq_id: int) -> None:
        """The server has answered this one, so everything before it was in line, or was given up."""
        self.next_seq = max(self.next_seq, seq_id + 1)
        self._advance()

    def _advance(self) -> None:
        while self.next_seq in self._seen:
            self.next_seq += 1
        self._seen = {seq_id for seq_id in self._seen if seq_id >= self.next_seq}
        self.refused = {seq_id for seq_id in self.refused if seq_id >= self.next_seq}
