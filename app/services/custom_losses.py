"""Losses that clients upload: checked once, kept, found again by their project, and put into batches that name them.

Responsible for who owns a loss and whether a batch has what it reads. Not responsible for what a graph may hold
(`schemas/custom_loss.py`) or for running it (engines).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import canonical_json, encode_request, encode_result
from app.codec import digest as digest_of
from app.services.runs import require_active
from schemas.custom_loss import LossInput, parse_graph
from schemas.errors import InvalidRequest, NotFound, OverLimit
from schemas.operations import Datum, TrainBatch
from schemas.requests import CreateCustomLossRequest
from schemas.responses import CreateCustomLossResult
from store import custom_losses, sessions
from store import operations as log
from store.database import Store
from store.records import NewOperation, OperationRecord

MAX_LOSSES = 1000
"""Of one session."""
MAX_GRAPH_BYTES = 256 * 1024

KIND = "create_custom_loss"


class CustomLosses:
    """Uploaded losses of all projects; every method is told whose.

    Args:
        max_bytes: what the losses of one project may take together.
        new_id: makes request ids of at least 128 random bits.
        clock: the time, aware UTC.
    """

    def __init__(
        self, store: Store, *, max_bytes: int, new_id: Callable[[], str], clock: Callable[[], datetime]
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._new_id = new_id
        self._clock = clock

    async def create(self, project_id: str, request: CreateCustomLossRequest) -> OperationRecord:
        """Keep a loss; the operation is done when this returns. A repeat gives the same one.

        Raises: `NotFound`, `Gone` (session), `InvalidRequest`, `OverLimit`, `SeqIdConflict`.
        """
        session_id = request.session_id
        found = await self._store.look_up(lambda db: sessions.get_session(db, project_id, session_id))
        if found is None:  # hide other projects' sessions before the log is asked about their scope
            await self._store.look_up(lambda db: require_active(db, project_id, session_id))
        graph = await asyncio.to_thread(_checked_graph, request)
        number, now = request.custom_loss_seq_id, self._clock()
        loss_id = f"{session_id}:loss:{number}"
        data, content_type = encode_result(KIND, CreateCustomLossResult(loss_id=loss_id))
        new = NewOperation(
            request_id=self._new_id(),
            project_id=project_id,
            kind=KIND,
            scope=f"session:{session_id}:custom_loss",
            seq_id=number,
            digest=digest_of(encode_request(request)),
            body=b"",
            created_at=now,
        )

        async def rows(db: AsyncSession) -> OperationRecord:
            record, created = await log.append(db, new)
            if created:
                await require_active(db, project_id, session_id)
                await self._check_room(db, project_id, session_id, custom_losses.size_of(graph))
                await custom_losses.add_custom_loss(
                    db,
                    loss_id=loss_id,
                    project_id=project_id,
                    session_id=session_id,
                    name=request.name,
                    graph=graph,
                    now=now,
                )
                await log.finish(db, record.request_id, data, content_type, now)
            return record

        return await self._store.write(rows)

    async def _check_room(self, db: AsyncSession, project_id: str, session_id: str, size: int) -> None:
        count, kept = await custom_losses.count_losses(db, project_id, session_id)
        if count >= MAX_LOSSES:
            raise InvalidRequest(f"this session has {MAX_LOSSES} custom losses already", field="session_id")
        if kept + size > self._max_bytes:
            raise OverLimit(
                f"custom losses of {kept + size:,} bytes would be kept for this project, and limit max_custom_loss_mib "
                f"of every project is {self._max_bytes >> 20}",
                field="graph",
                hint="use losses that were uploaded before, give what changes as loss_fn_inputs, and finish sessions: "
                "their losses go log_retention after them; or ask the operator for a larger max_custom_loss_mib",
            )

    async def with_graph(self, project_id: str, batch: TrainBatch, loss_id: str) -> TrainBatch:
        """The batch with the graph of its loss, and of each example only what the graph reads.

        Raises: `NotFound` if the project has no such loss, `InvalidRequest` if an example lacks an input.
        """
        graph = await self._store.look_up(lambda db: custom_losses.get_graph(db, project_id, loss_id))
        if graph is None:
            raise NotFound(f"no custom loss {loss_id[:200]!r}", field="loss_fn_config.loss_id")
        inputs = [LossInput(**entry) for entry in json.loads(graph)["inputs"]]
        datums = tuple(_read_by(datum, inputs, f"data[{i}].loss_fn_inputs") for i, datum in enumerate(batch.datums))
        return replace(batch, datums=datums, loss_graph=graph)


def _checked_graph(request: CreateCustomLossRequest) -> str:
    """What is kept of a loss, as canonical JSON."""
    inputs = [entry.model_dump() for entry in request.inputs]
    nodes = [node.model_dump() for node in request.graph.nodes]
    parse_graph(inputs, nodes)
    text = canonical_json({"inputs": inputs, "nodes": nodes})
    if len(text) > MAX_GRAPH_BYTES:
        raise InvalidRequest(
            f"graph has {len(text)} bytes; at most {MAX_GRAPH_BYTES} are accepted",
            field="graph",
            hint="give large constants as loss_fn_inputs",
        )
    return text.decode()


def _read_by(datum: Datum, inputs: list[LossInput], where: str) -> Datum:
    """The example with its targets and the declared inputs; `logprobs` is what the model computes."""
    kept = {"target_tokens": datum.inputs["target_tokens"]}
    _check_rank(kept["target_tokens"].ndim, inputs[0], f"{where}.target_tokens")
    for declared in inputs[1:]:
        field = f"{where}.{declared.name}"
        values = datum.inputs.get(declared.name)
        if values is None:
            raise InvalidRequest(f"{where} lacks {declared.name}, which this loss reads", field=field)
        if declared.rank > 0 or values.size != 1:
            _check_rank(values.ndim, declared, field)
        kept[declared.name] = values
    return Datum(datum.tokens, kept)


def _check_rank(found: int, declared: LossInput, field: str) -> None:
    if found != declared.rank:
        raise InvalidRequest(
            f"{field} has rank {found}, but this loss declares {declared.name} with rank {declared.rank}", field=field
        )
