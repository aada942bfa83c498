"""What the training requests mean: creating a run, forward, forward_backward, optim_step, zero_grad.

Responsible for turning validated requests into operations and their results into answers. Not responsible for saving and
loading (`weights.py`), for the log (`operations.py`) or for order (`workers/runtime.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import orjson
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from app.codec.operations import decode_operation, digest, encode_operation
from app.codec.results import encode_result
from app.services.base_models import BaseModels
from app.services.limits import check_batch
from app.services.operations import Finished, Operations, Submission
from app.services.paths import model_id_of
from app.services.runs import Runs, model_scope, require_active
from schemas.errors import InvalidRequest
from schemas.http.training import adam_values
from schemas.operations import (
    CreateModel,
    LoraSpec,
    Operation,
    OperationResult,
    OptimStep,
    OptimStepParams,
    TrainBatch,
    ZeroGrad,
)
from schemas.requests import CreateModelRequest, OptimStepRequest, RequestModel, ZeroGradRequest
from schemas.responses import CreateModelResult, OptimStepResult, ZeroGradResult
from store import runs as run_rows
from store import sessions
from store.database import Store
from store.records import OperationRecord

JSON_TYPE = "application/json"


class Training:
    """Accepts training requests.

    Args:
        draw_seed: makes a seed for an adapter whose client gave none.
        clock: the time, aware UTC.
    """

    def __init__(
        self,
        *,
        store: Store,
        models: BaseModels,
        operations: Operations,
        runs: Runs,
        max_rank: int,
        draw_seed: Callable[[], int],
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._models = models
        self._operations = operations
        self._runs = runs
        self._max_rank = max_rank
        self._draw_seed = draw_seed
        self._clock = clock

    async def create_model(self, project_id: str, request: CreateModelRequest) -> tuple[OperationRecord, str]:
        """Begin a training run; returns the operation and the model id.

        Raises: `NotFound`, `Gone` (session), `InvalidRequest`, `SeqIdConflict`.
        """
        session_id = request.session_id
        await self._require_session(project_id, session_id)
        runtime = self._models.runtime(request.base_model)
        lora = self._lora(request)
        model_id = model_id_of(session_id, request.model_seq_id)

        async def guard(db: AsyncSession) -> None:
            await require_active(db, project_id, session_id)
            await run_rows.create_run(
                db,
                model_id=model_id,
                project_id=project_id,
                session_id=session_id,
                model_seq_id=request.model_seq_id,
                base_model=request.base_model,
                lora=lora,
                user_metadata=request.user_metadata or {},
                optimizer_type=request.optimizer_config.type,
                now=self._clock(),
            )

        async def ready(db: AsyncSession) -> None:
            await run_rows.set_run_state(db, model_id, "ready")

        async def failed(db: AsyncSession) -> None:
            await run_rows.set_run_state(db, model_id, "failed")

        record = await self._operations.accept(
            Submission(
                project_id=project_id,
                kind="create_model",
                scope=creation_scope(session_id),
                seq_id=request.model_seq_id,
                digest=request_digest("create_model", request),
                body=encode_operation(CreateModel(lora)),
                runtime=runtime,
                model_id=model_id,
                creates=True,
                guard=guard,
                load=decode_operation,
                finish=lambda _: json_result(CreateModelResult(model_id=model_id), ready),
                failed=failed,
            )
        )
        return record, model_id

    async def forward_backward(
        self, project_id: str, model_id: str, seq_id: int | None, batch: TrainBatch, body: bytes
    ) -> OperationRecord:
        """Accept one forward or forward_backward; `body` is its canonical form (see `app/codec`).

        Raises: `NotFound`, `ModelLost`, `Gone`, `InvalidRequest`, `SeqIdConflict`.
        """
        run = await self._runs.owned(project_id, model_id)
        runtime = self._runs.runtime(run)
        check_batch(batch, runtime.info)
        kind = "forward_backward" if batch.backward else "forward"
        return await self._operations.accept(
            Submission(
                project_id=project_id,
                kind=kind,
                scope=model_scope(model_id),
                seq_id=seq_id,
                digest=digest(body),
                body=body,
                runtime=runtime,
                model_id=model_id,
                guard=self._runs.guard(project_id, model_id),
                load=decode_operation,
                finish=encoded_result,
            )
        )

    async def optim_step(self, project_id: str, request: OptimStepRequest) -> OperationRecord:
        """Accept one optimizer step. Raises as `forward_backward`."""
        values = adam_values(request)
        params = OptimStepParams(
            lr=values["learning_rate"],
            betas=(values["beta1"], values["beta2"]),
            eps=values["eps"],
            weight_decay=values["weight_decay"],
        )
        step = OptimStep(params, grad_clip_norm=values["grad_clip_norm"])
        return await self._simple(project_id, "optim_step", request.model_id, request.seq_id, request, step, _stepped)

    async def zero_grad(self, project_id: str, request: ZeroGradRequest) -> OperationRecord:
        """Accept a clearing of the accumulated gradient. Raises as `forward_backward`."""
        return await self._simple(
            project_id,
            "zero_grad",
            request.model_id,
            request.seq_id,
            request,
            ZeroGrad(),
            lambda _: json_result(ZeroGradResult()),
        )

    async def _simple(
        self,
        project_id: str,
        kind: str,
        model_id: str,
        seq_id: int | None,
        request: RequestModel,
        operation: Operation,
        finish: Callable[[OperationResult], Finished],
    ) -> OperationRecord:
        run = await self._runs.owned(project_id, model_id)
        return await self._operations.accept(
            Submission(
                project_id=project_id,
                kind=kind,
                scope=model_scope(model_id),
                seq_id=seq_id,
                digest=request_digest(kind, request),
                body=encode_operation(operation),
                runtime=self._runs.runtime(run),
                model_id=model_id,
                guard=self._runs.guard(project_id, model_id),
                load=decode_operation,
                finish=finish,
            )
        )

    def _lora(self, request: CreateModelRequest) -> LoraSpec:
        wanted = request.lora_config
        if wanted.rank > self._max_rank:
            raise InvalidRequest(
                f"lora_config.rank {wanted.rank} is over this server's limit; 1 to {self._max_rank} is accepted",
                field="lora_config.rank",
            )
        return LoraSpec(
            rank=wanted.rank,
            seed=self._draw_seed() if wanted.seed is None else wanted.seed,
            train_attn=wanted.train_attn,
            train_mlp=wanted.train_mlp,
            train_unembed=wanted.train_unembed,
        )

    async def _require_session(self, project_id: str, session_id: str) -> None:
        """Hide other projects' sessions before the log is asked about their scope."""
        session = await self._store.read(lambda db: sessions.get_session(db, project_id, session_id))
        if session is None:
            await self._store.read(lambda db: require_active(db, project_id, session_id))


def creation_scope(session_id: str) -> str:
    """The scope in which the training runs of a session are numbered, however they are created."""
    return f"session:{session_id}:train"


def request_digest(kind: str, request: BaseModel) -> str:
    """What a repeat of a JSON request is recognised by: everything the client said, in a canonical order."""
    said: dict[str, Any] = request.model_dump(mode="json")
    return digest(kind.encode() + b"\n" + orjson.dumps(said, option=orjson.OPT_SORT_KEYS))


def json_result(answer: BaseModel, rows: Any = None) -> Finished:
    """A JSON result; fields that are None are left out."""
    return Finished(answer.model_dump_json(exclude_none=True).encode(), JSON_TYPE, rows)


def encoded_result(outcome: OperationResult) -> Finished:
    """A protobuf result."""
    data, content_type = encode_result(outcome)
    return Finished(data, content_type)


def _stepped(outcome: OperationResult) -> Finished:
    metrics = getattr(outcome, "metrics", {})
    return json_result(OptimStepResult(metrics=dict(metrics)))


def with_folder(operation: Operation, resolve: Callable[[str], str]) -> Operation:
    """Turn the folder names inside a stored operation into paths for workers; rows never hold absolute paths."""
    for name in ("folder", "adapter_folder"):
        folder = getattr(operation, name, None)
        if folder is not None:
            return replace(operation, **{name: resolve(folder)})  # type: ignore[arg-type]
    return operation
