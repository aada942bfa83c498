"""What the training requests mean: creating a run, forward, forward_backward, optim_step, zero_grad.

Responsible for turning requests into operations and their results into answers. Not responsible for saving and loading
(`weights.py`), for the log (`operations.py`) or for order (`workers/runtime.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import (
    CodecLimits,
    ParsedForwardBackward,
    decode_forward_backward,
    digest,
    encode_operation,
    encode_request,
    encode_result,
    lora_spec,
    optim_step_operation,
)
from app.services.base_models import BaseModels
from app.services.custom_losses import CustomLosses
from app.services.limits import check_batch
from app.services.operations import Operations
from app.services.paths import model_id_of
from app.services.provenance import with_recorded
from app.services.run_metrics import RunMetrics
from app.services.runs import Runs, model_scope, optimizer_of, require_active
from app.services.stability import Stability
from app.services.submission import Finished, Rows, Submission, resumed
from app.services.tenant_limits import Cost
from app.services.turnstile import Turnstile, aside
from app.services.usage import batch_tokens
from engines.capabilities import Capabilities
from schemas.errors import InvalidRequest
from schemas.http.base import RequestModel, ResponseModel
from schemas.operations import (
    CreateModel,
    DimuonStepParams,
    LoraSpec,
    Operation,
    OperationResult,
    OptimizerType,
    OptimStep,
    TrainBatch,
    ZeroGrad,
)
from schemas.requests import CreateModelRequest, OptimStepRequest, UnloadModelRequest, ZeroGradRequest
from schemas.responses import CreateModelResult, UnloadModelResult
from store import runs as run_rows
from store import sessions
from store.database import Store
from store.records import OperationRecord, RunRecord, RunState
from workers.runtime_protocol import Runtime

T = TypeVar("T")

DECODERS = 1
"""Training batches that are decoded at once. Decoding holds the interpreter most of the time: more of it at once would
finish no sooner, and leave less of the interpreter to the event loop. Projects take turns."""


class Training:
    """Accepts training requests.

    Args:
        capabilities: of the engine that trains.
        draw_seed: makes a seed for an adapter whose client gave none.
    """

    def __init__(
        self,
        *,
        store: Store,
        models: BaseModels,
        operations: Operations,
        runs: Runs,
        stability: Stability,
        custom_losses: CustomLosses,
        metrics: RunMetrics,
        capabilities: Capabilities,
        max_rank: int,
        max_request_tokens: int,
        draw_seed: Callable[[], int],
    ) -> None:
        self._store = store
        self._models = models
        self._operations = operations
        self._runs = runs
        self._stability = stability
        self._custom_losses = custom_losses
        self._metrics = metrics
        self._capabilities = capabilities
        self._max_rank = max_rank
        self._max_request_tokens = max_request_tokens
        self._draw_seed = draw_seed
        self._decoding = Turnstile(DECODERS)

    async def create_model(self, project_id: str, request: CreateModelRequest) -> tuple[OperationRecord, str]:
        """Begin a training run; returns the operation and the model id.

        Raises: `NotFound`, `Gone` (session), `InvalidRequest`, `SeqIdConflict`.
        """
        session_id = request.session_id
        await self._require_session(project_id, session_id)
        runtime = self._models.runtime(request.base_model)
        self._capabilities.check_optimizer(request.optimizer_config.type)
        lora = self._lora(request)
        model_id = model_id_of(session_id, request.model_seq_id)

        guard = self._runs.creation(
            project_id,
            session_id,
            request.model_seq_id,
            base_model=request.base_model,
            lora=lora,
            user_metadata=request.user_metadata,
            optimizer=request.optimizer_config.type,
        )
        record = await self._operations.accept(
            Submission(
                project_id=project_id,
                kind="create_model",
                scope=creation_scope(session_id),
                seq_id=request.model_seq_id,
                digest=request_digest(request),
                body=encode_operation("create_model", CreateModel(lora, request.optimizer_config.type)),
                runtime=runtime,
                model_id=model_id,
                creates=True,
                guard=guard,
                finish=_created(model_id),
                failed=state_rows(model_id, "failed"),
                cost=Cost(rank=lora.rank),
            )
        )
        return record, model_id

    def resume(self, record: OperationRecord, run: RunRecord) -> Submission:
        """A training request that an earlier process accepted and did not finish, as it was submitted there."""
        runtime, model_id = self._runs.runtime(run), run.model_id
        if record.kind == "create_model":
            failed = state_rows(model_id, "failed")
            return resumed(record, runtime, model_id, _created(model_id), creates=True, failed=failed)
        if record.kind == "unload_model":
            settled = _closing(runtime, model_id)
            return resumed(record, runtime, model_id, _unloaded(model_id), last=True, settled=settled)
        return resumed(record, runtime, model_id, encoded_result(record.kind), measure=self._metrics.of(record.kind))

    async def forward_backward(
        self, project_id: str, body: bytes, content_type: str, limits: CodecLimits, *, forward: bool
    ) -> tuple[OperationRecord, str]:
        """Accept one forward or forward_backward; returns the operation and the model id.

        Args:
            body: as read off the wire, decompressed.
            forward: the route is `forward`.

        Raises: `NotFound`, `ModelLost`, `Gone`, `InvalidRequest`, `SeqIdConflict`, `UnsupportedMediaType`.
        """
        decoding = partial(_decode, body, content_type, limits, forward)
        parsed, canonical, fingerprint = await aside(self._in_turn(project_id, decoding))
        model_id = parsed.model_id
        run = await self._runs.owned(project_id, model_id)
        runtime = self._runs.runtime(run)
        check_batch(parsed.batch, runtime.info, self._max_request_tokens)
        kind, batch = _batch_kind(parsed), parsed.batch
        if parsed.sampled:
            batch = await with_recorded(self._stability, project_id, batch, parsed.sampled)
        if parsed.loss_id is not None:
            batch = await self._custom_losses.with_graph(project_id, batch, parsed.loss_id)
        if batch is not parsed.batch:
            canonical = await aside(self._in_turn(project_id, partial(encode_operation, kind, batch)))
        record = await self._operations.accept(
            Submission(
                project_id=project_id,
                kind=kind,
                scope=model_scope(model_id),
                seq_id=parsed.seq_id,
                digest=fingerprint,
                body=canonical,
                runtime=runtime,
                model_id=model_id,
                guard=self._runs.guard(project_id, model_id),
                finish=encoded_result(kind),
                measure=self._metrics.of(kind),
                cost=_cost(batch),
            )
        )
        return record, model_id

    async def _in_turn(self, project_id: str, work: Callable[[], T]) -> T:
        """Do in a thread what takes long for a large body, when it is the project's turn."""
        async with self._decoding.turn(project_id):
            return await asyncio.to_thread(work)

    async def optim_step(self, project_id: str, request: OptimStepRequest) -> OperationRecord:
        """Accept one optimizer step. Raises as `forward_backward`."""
        operation = optim_step_operation(request)
        run = await self._runs.owned(project_id, request.model_id)
        _check_optimizer(request, operation, optimizer_of(run))
        return await self._simple(project_id, "optim_step", request, operation)

    async def zero_grad(self, project_id: str, request: ZeroGradRequest) -> OperationRecord:
        """Accept a clearing of the accumulated gradient. Raises as `forward_backward`."""
        return await self._simple(project_id, "zero_grad", request, ZeroGrad())

    async def unload(self, project_id: str, request: UnloadModelRequest) -> OperationRecord:
        """Accept that a model is freed once all that it has been asked for is done; a repeat changes nothing.

        It runs as a clearing of the gradient at the end of the model's queue; the adapter goes when that is done.

        Raises as `forward_backward`.
        """
        run = await self._runs.owned(project_id, request.model_id)
        model_id, runtime = run.model_id, self._runs.runtime(run)
        return await self._operations.accept(
            Submission(
                project_id=project_id,
                kind="unload_model",
                scope=f"unload:{model_id}",
                seq_id=0,
                digest=request_digest(request),
                body=encode_operation("unload_model", ZeroGrad()),
                runtime=runtime,
                model_id=model_id,
                guard=self._runs.guard(project_id, model_id),
                finish=_unloaded(model_id),
                last=True,
                settled=_closing(runtime, model_id),
            )
        )

    async def _simple(
        self, project_id: str, kind: str, request: OptimStepRequest | ZeroGradRequest, operation: Operation
    ) -> OperationRecord:
        run = await self._runs.owned(project_id, request.model_id)
        return await self._operations.accept(
            Submission(
                project_id=project_id,
                kind=kind,
                scope=model_scope(run.model_id),
                seq_id=request.seq_id,
                digest=request_digest(request),
                body=encode_operation(kind, operation),
                runtime=self._runs.runtime(run),
                model_id=run.model_id,
                guard=self._runs.guard(project_id, run.model_id),
                finish=encoded_result(kind),
                measure=self._metrics.of(kind),
            )
        )

    def _lora(self, request: CreateModelRequest) -> LoraSpec:
        wanted = request.lora_config
        if wanted.rank > self._max_rank:
            raise InvalidRequest(
                f"lora_config.rank {wanted.rank} is over this server's limit; 1 to {self._max_rank} is accepted",
                field="lora_config.rank",
            )
        return lora_spec(wanted, self._draw_seed)

    async def _require_session(self, project_id: str, session_id: str) -> None:
        """Hide other projects' sessions before the log is asked about their scope."""
        session = await self._store.look_up(lambda db: sessions.get_session(db, project_id, session_id))
        if session is None:
            await self._store.look_up(lambda db: require_active(db, project_id, session_id))


def state_rows(model_id: str, state: RunState) -> Rows:
    """The change of a run's state, for the transaction of an operation."""

    async def rows(db: AsyncSession) -> None:
        await run_rows.set_run_state(db, model_id, state)

    return rows


def _created(model_id: str) -> Callable[[OperationResult], Finished]:
    return lambda _: json_result("create_model", CreateModelResult(model_id=model_id), state_rows(model_id, "ready"))


def _unloaded(model_id: str) -> Callable[[OperationResult], Finished]:
    return lambda _: json_result("unload_model", UnloadModelResult(model_id=model_id), state_rows(model_id, "closed"))


def _closing(runtime: Runtime, model_id: str) -> Callable[[], None]:
    return lambda: runtime.close_model(model_id)


def _check_optimizer(request: OptimStepRequest, operation: OptimStep, optimizer: OptimizerType) -> None:
    """Raise `InvalidRequest` if the hyperparameters are those of another optimizer than the model's."""
    given: OptimizerType = "dimuon" if isinstance(operation.params, DimuonStepParams) else "adamw"
    if given == optimizer:
        return
    field = "optimizer_params.type" if request.given_in == "optimizer_params" else "adam_params"
    accepted = "adam_params" if optimizer == "adamw" else 'optimizer_params {"type": "dimuon", "learning_rate": ...}'
    raise InvalidRequest(
        f"{field} is of {given}, but the optimizer of this model is {optimizer}; accepted: {accepted}",
        field=field,
    )


def _decode(
    body: bytes, content_type: str, limits: CodecLimits, forward: bool
) -> tuple[ParsedForwardBackward, bytes, str]:
    """The batch, its canonical form and the digest of that: all that is slow about a large body, for a thread."""
    parsed = decode_forward_backward(body, content_type, limits, forward=forward)
    canonical = encode_operation(_batch_kind(parsed), parsed.batch)
    beside = repr((parsed.loss_id, parsed.sampled)).encode() if parsed.loss_id or parsed.sampled else b""
    return parsed, canonical, digest(canonical + beside)


def _cost(batch: TrainBatch) -> Cost:
    lengths = [len(datum.tokens) for datum in batch.datums]
    return Cost(training=sum(lengths), longest=max(lengths, default=0))


def _batch_kind(parsed: ParsedForwardBackward) -> str:
    return "forward" if parsed.forward_only else "forward_backward"


def creation_scope(session_id: str) -> str:
    """The scope in which the training runs of a session are numbered, however they are created."""
    return f"session:{session_id}:train"


def request_digest(request: RequestModel) -> str:
    """What a repeat of a JSON request is recognised by: everything that the client said."""
    return digest(encode_request(request))


def json_result(kind: str, answer: ResponseModel, rows: Rows | None = None) -> Finished:
    """A result that the server puts together itself, and the rows that become true with it."""
    data, content_type = encode_result(kind, answer)
    return Finished(data, content_type, rows)


def encoded_result(kind: str) -> Callable[[OperationResult], Finished]:
    """What encodes results that are sent just as the engine computed them."""

    def finish(outcome: OperationResult) -> Finished:
        data, content_type = encode_result(kind, outcome)
        return Finished(data, content_type, tokens=batch_tokens(outcome))

    return finish
