"""What loading means: a checkpoint into a live model, or a new model from a checkpoint.

Not responsible for checkpoint rows (`checkpoints.py`), for the log (`operations.py`) or for what is in a folder
(engines).
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import decode_context, decode_operation, encode_operation
from app.services.access import AccessTokens
from app.services.base_models import BaseModels
from app.services.checkpoints import Checkpoints, refuse_export
from app.services.operations import Operations
from app.services.paths import model_id_of
from app.services.runs import Runs, model_scope, optimizer_of, optimizer_type, require_active
from app.services.saves import saved_adapter
from app.services.submission import Finished, Submission, resumed
from app.services.tenant_limits import Cost
from app.services.training import creation_scope, json_result, request_digest, state_rows
from engines.capabilities import Capabilities
from schemas.errors import InvalidRequest
from schemas.operations import LoadWeights, OperationResult, OptimizerType
from schemas.requests import (
    LoadWeightsRequest,
)
from schemas.responses import (
    LoadWeightsResult,
)
from store import runs as run_rows
from store.database import Store
from store.records import CheckpointRecord, OperationRecord, RunRecord


class Loads:
    """Accepts the requests that load weights. `capabilities` are those of the engine."""

    def __init__(
        self,
        *,
        store: Store,
        models: BaseModels,
        operations: Operations,
        runs: Runs,
        checkpoints: Checkpoints,
        access: AccessTokens,
        capabilities: Capabilities,
    ) -> None:
        self._store = store
        self._models = models
        self._operations = operations
        self._runs = runs
        self._checkpoints = checkpoints
        self._access = access
        self._capabilities = capabilities

    async def load(self, project_id: str, request: LoadWeightsRequest) -> tuple[OperationRecord, str]:
        """Accept a load into the live model, or one that creates a model; returns the operation and the model id.

        Raises: `NotFound`, `ModelLost`, `Gone`, `InvalidRequest`, `SeqIdConflict`.
        """
        if request.model_id is not None:
            return await self._load_into(project_id, request, request.model_id), request.model_id
        return await self._load_new(project_id, request)

    async def _load_into(self, project_id: str, request: LoadWeightsRequest, model_id: str) -> OperationRecord:
        run = await self._runs.owned(project_id, model_id)
        checkpoint = await self._loadable(project_id, request)
        if not self._models.same_source(checkpoint.base_model, run.base_model):
            raise InvalidRequest(
                f"path: the checkpoint is of base model {checkpoint.base_model!r}, the model of {run.base_model!r}",
                field="path",
            )
        if request.optimizer and checkpoint.optimizer_type != optimizer_of(run):
            raise InvalidRequest(
                f"optimizer: the checkpoint has the state of {checkpoint.optimizer_type}, the model is trained by "
                f"{optimizer_of(run)}",
                field="optimizer",
                hint="load it with optimizer=false",
            )
        return await self._operations.accept(
            Submission(
                project_id=project_id,
                kind="load_weights",
                scope=model_scope(model_id),
                seq_id=request.seq_id,
                digest=request_digest(request),
                body=encode_operation(
                    "load_weights",
                    LoadWeights(checkpoint.folder, request.optimizer, create=False),
                    {"path": request.path},
                ),
                runtime=self._runs.runtime(run),
                model_id=model_id,
                guard=self._runs.guard(project_id, model_id),
                finish=_loaded(model_id, request.path),
                checkpoint_id=checkpoint.checkpoint_id,
                reads=checkpoint.folder,
            )
        )

    async def _load_new(self, project_id: str, request: LoadWeightsRequest) -> tuple[OperationRecord, str]:
        session_id, model_seq_id = request.session_id or "", request.model_seq_id or 0
        await self._store.look_up(lambda db: require_active(db, project_id, session_id))
        checkpoint = await self._loadable(project_id, request)
        base_model = request.base_model or checkpoint.base_model
        if not self._models.same_source(checkpoint.base_model, base_model):
            raise InvalidRequest(
                f"base_model {base_model!r} is not that of the checkpoint, {checkpoint.base_model!r}",
                field="base_model",
            )
        optimizer = _new_optimizer(request, checkpoint)
        self._capabilities.check_optimizer(optimizer, field="optimizer")
        runtime = self._models.runtime(base_model)
        model_id = model_id_of(session_id, model_seq_id)

        guard = self._runs.creation(
            project_id,
            session_id,
            model_seq_id,
            base_model=base_model,
            lora=checkpoint.lora,
            user_metadata=request.user_metadata,
            optimizer=optimizer,
        )
        record = await self._operations.accept(
            Submission(
                project_id=project_id,
                kind="load_weights",
                scope=creation_scope(session_id),
                seq_id=model_seq_id,
                digest=request_digest(request),
                body=encode_operation(
                    "load_weights",
                    LoadWeights(checkpoint.folder, request.optimizer, True, optimizer),
                    {"path": request.path},
                ),
                runtime=runtime,
                model_id=model_id,
                creates=True,
                guard=guard,
                finish=_loaded_new(model_id, request.path),
                checkpoint_id=checkpoint.checkpoint_id,
                reads=checkpoint.folder,
                failed=state_rows(model_id, "failed"),
                cost=Cost(rank=checkpoint.lora.rank),
            )
        )
        return record, model_id

    async def _loadable(self, project_id: str, request: LoadWeightsRequest) -> CheckpointRecord:
        """The checkpoint to load. Raises `InvalidRequest` if the optimizer is asked of one that cannot have any."""
        token = request.weights_access_token
        allowed = await self._access.readers(project_id, token, field="weights_access_token", needs="train")
        checkpoint = await self._checkpoints.readable(allowed, request.path, field="path")
        refuse_export(checkpoint, field="path")
        if request.optimizer and not checkpoint.has_optimizer:
            raise InvalidRequest(
                f"optimizer: {request.path!r} is a {checkpoint.kind} checkpoint without optimizer state",
                field="optimizer",
                hint="load it with optimizer=false, or load a training checkpoint (tinker://.../weights/...)",
                code="no_optimizer_state",
            )
        return checkpoint

    def resume(self, record: OperationRecord, run: RunRecord, body: bytes) -> Submission:
        """A load that an earlier process accepted and did not finish, as it was submitted there.

        Raises `ValueError` (or what is one) if the stored form does not say enough.
        """
        runtime, model_id = self._runs.runtime(run), run.model_id
        operation, context = decode_operation(record.kind, body), decode_context(record.kind, body)
        if not isinstance(operation, LoadWeights):
            raise ValueError(f"{record.kind} is no load")
        path, reads = str(context["path"]), operation.folder
        if not operation.create:
            return resumed(record, runtime, model_id, _loaded(model_id, path), reads=reads)
        made, failed = _loaded_new(model_id, path), state_rows(model_id, "failed")
        return resumed(record, runtime, model_id, made, creates=True, failed=failed, reads=reads)


def _loaded(model_id: str, path: str) -> Callable[[OperationResult], Finished]:
    return lambda _: json_result("load_weights", LoadWeightsResult(path=path, model_id=model_id))


def _loaded_new(model_id: str, path: str) -> Callable[[OperationResult], Finished]:
    def finish(outcome: OperationResult) -> Finished:
        lora = saved_adapter(outcome).lora

        async def rows(db: AsyncSession) -> None:
            await run_rows.set_run_lora(db, model_id, lora)
            await run_rows.set_run_state(db, model_id, "ready")

        return json_result("load_weights", LoadWeightsResult(path=path, model_id=model_id), rows)

    return finish


def _new_optimizer(request: LoadWeightsRequest, checkpoint: CheckpointRecord) -> OptimizerType:
    """That of a model made from a checkpoint: its own with its state, else the one asked for, else AdamW."""
    asked = request.optimizer_config
    if not request.optimizer:
        return "adamw" if asked is None else asked.type
    kept = optimizer_type(checkpoint.optimizer_type)
    if asked is not None and asked.type != kept:
        raise InvalidRequest(
            f"optimizer_config.type is {asked.type!r}, but the checkpoint has the state of {kept!r}",
            field="optimizer_config",
            hint="leave optimizer_config out, or load with optimizer=false to begin with another optimizer",
        )
    return kept
