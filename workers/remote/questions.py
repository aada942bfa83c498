"""Answers what the server of a runtime asks an edge: operations read back, outcomes recorded, the past of a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from schemas.errors import EngineFailure, NotFound
from schemas.operations import Operation
from workers.faults import to_tinsmith_error
from workers.recovery import History, Past, lost
from workers.remote.desk import EdgeDesk
from workers.remote.messages import (
    DropSnapshot,
    KeepSnapshot,
    OperationOf,
    PastOperationOf,
    Recall,
    RecordLost,
    Remembered,
    RememberedOperation,
    Settle,
    SnapshotPath,
    Undo,
)

_log = logging.getLogger("tinsmith.remote")


class Questions:
    """The edge's side of the server's questions.

    Args:
        history: the log and the snapshots; None = models cannot be brought back.
        on_models_lost: told which models cannot be brought back.
    """

    def __init__(
        self,
        desk: EdgeDesk,
        history: History | None,
        on_models_lost: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._desk = desk
        self._history = history
        self._on_models_lost = on_models_lost
        self._pasts: dict[str, Past] = {}
        """What was recalled last of each model, for the ways to read its operations."""

    def forget(self, model_id: str) -> None:
        """A model is over."""
        self._pasts.pop(model_id, None)

    async def answer(self, question: Any) -> Any:
        """The answer. Raises a `TinsmithError`."""
        try:
            return await self._answer(question)
        except Exception as error:
            reading = isinstance(question, OperationOf | PastOperationOf)
            doing = "reading the request back" if reading else f"answering {type(question).__name__}"
            raise to_tinsmith_error(error, doing) from None

    async def _answer(self, question: Any) -> Any:
        match question:
            case OperationOf(request_id):
                return await self._read(request_id)
            case Settle(request_id, outcome):
                recording = self._desk.finish(request_id, outcome)
                return None if recording is None else await asyncio.shield(recording)
            case Undo(request_id):
                entry = self._desk.find(request_id)
                if entry is not None and entry.ticket.undo is not None:
                    await entry.ticket.undo()
            case Recall(model_id):
                return await self._recall(model_id)
            case PastOperationOf(model_id, past_id):
                return await self._read_past(model_id, past_id)
            case SnapshotPath():
                return await self._log.new_snapshot_path()
            case KeepSnapshot(model_id, applied_seq, path, saved):
                return await self._log.keep_snapshot(model_id, applied_seq, path, saved)
            case DropSnapshot(path):
                await self._log.drop_snapshot(path)
            case RecordLost(model_ids):
                await self._record_lost(model_ids)
            case _:
                raise EngineFailure(f"a server asked {type(question).__name__}")
        return None

    @property
    def _log(self) -> History:
        if self._history is None:
            raise EngineFailure("this edge has no log")
        return self._history

    async def _read(self, request_id: str) -> Operation:
        entry = self._desk.find(request_id)
        if entry is None:
            raise NotFound(f"request {request_id} is not open any more")
        return await entry.ticket.load()

    async def _recall(self, model_id: str) -> Remembered:
        if self._history is None:
            raise lost(model_id, "there is no log of it")
        await self._desk.recorded()  # what is being answered belongs to the past
        past = self._pasts[model_id] = await self._history.recall(model_id)
        return Remembered(
            past.project_id,
            past.snapshots,
            tuple(
                RememberedOperation(one.seq_id, one.request_id, one.is_step, one.size, one.failed)
                for one in past.operations
            ),
            past.collected_seq,
        )

    async def _read_past(self, model_id: str, request_id: str | None) -> Operation:
        past = self._pasts.get(model_id)
        if past is None:
            raise lost(model_id, "its past was not recalled")
        if request_id is None:
            return await past.creation()
        for one in past.operations:
            if one.request_id == request_id:
                return await one.load()
        raise lost(model_id, "an operation of its past is unknown")

    async def _record_lost(self, model_ids: Sequence[str]) -> None:
        try:
            await self._on_models_lost(model_ids)
        except Exception:
            _log.exception("the loss of %d models cannot be recorded", len(model_ids))
        for model_id in model_ids:
            self._desk.lose(model_id, lost(model_id, "it cannot be brought back"))
