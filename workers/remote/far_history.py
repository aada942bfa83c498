"""The log and the snapshots, asked of the edge that has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from schemas.errors import Unavailable
from schemas.operations import Operation, SavedSnapshot
from workers.recovery import Past, PastOperation
from workers.remote.attachment import Attachment, EdgeGone
from workers.remote.messages import (
    DropSnapshot,
    KeepSnapshot,
    PastOperationOf,
    Recall,
    Remembered,
    SnapshotPath,
)


class FarHistory:
    """Implements `workers.recovery.History` by questions.

    Args:
        edge_of: the edge that has opened a model, or None.
        any_edge: an edge that is there, or None.
    """

    def __init__(self, edge_of: Callable[[str], Attachment | None], any_edge: Callable[[], Attachment | None]) -> None:
        self._edge_of = edge_of
        self._any_edge = any_edge

    async def recall(self, model_id: str) -> Past:
        """See `History.recall`."""
        edge = _there(self._edge_of(model_id))
        found: Remembered = await edge.ask(Recall(model_id))
        return Past(
            project_id=found.project_id,
            snapshots=found.snapshots,
            operations=tuple(
                PastOperation(
                    one.seq_id,
                    one.request_id,
                    one.is_step,
                    one.size,
                    one.failed,
                    partial(_read, edge, model_id, one.request_id),
                )
                for one in found.operations
            ),
            collected_seq=found.collected_seq,
            creation=partial(_read, edge, model_id, None),
        )

    async def new_snapshot_path(self) -> str:
        """See `History.new_snapshot_path`."""
        path: str = await _there(self._any_edge()).ask(SnapshotPath())
        return path

    async def keep_snapshot(self, model_id: str, applied_seq: int, path: str, saved: SavedSnapshot) -> bool:
        """See `History.keep_snapshot`."""
        edge = self._edge_of(model_id)
        if edge is None:
            return False
        try:
            kept: bool = await edge.ask(KeepSnapshot(model_id, applied_seq, path, saved))
        except EdgeGone:
            return False
        return kept

    async def drop_snapshot(self, path: str) -> None:
        """See `History.drop_snapshot`. Without an edge the file stays until one sweeps its folder."""
        edge = self._any_edge()
        if edge is not None:
            await edge.ask(DropSnapshot(path))


async def _read(edge: Attachment, model_id: str, request_id: str | None) -> Operation:
    operation: Any = await edge.ask(PastOperationOf(model_id, request_id))
    return operation  # type: ignore[no-any-return]


def _there(edge: Attachment | None) -> Attachment:
    if edge is None:
        raise Unavailable("the server that has the log is gone")
    return edge
