"""What saving and loading mean: checkpoints of a run, runs from a checkpoint, weights for sampling.

Responsible for the requests `save_weights`, `load_weights` and `save_weights_for_sampler`. Not responsible for
checkpoint rows (`checkpoints.py`), for the log (`operations.py`) or for what is in a folder (engines).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import decode_context, decode_operation, encode_operation
from app.services.access import readers
from app.services.age_encryption import encrypt_folder, parse_recipients
from app.services.base_models import BaseModels
from app.services.checkpoints import Checkpoints, NewCheckpoint, refuse_export
from app.services.exports import EXPORTED_FILES
from app.services.operations import Finished, Operations, Rows, Submission, resumed
from app.services.paths import CheckpointPath, model_id_of, sampler_id_of
from app.services.runs import Runs, model_scope, optimizer_of, optimizer_type, require_active
from app.services.training import creation_scope, json_result, request_digest, state_rows
from engines.capabilities import Capabilities
from schemas.errors import EngineFailure, InvalidRequest
from schemas.fail_points import fail_point
from schemas.operations import LoadWeights, OperationResult, OptimizerType, SavedAdapter, SaveWeights
from schemas.requests import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from schemas.responses import (
    LoadWeightsResult,
    SaveWeightsExternalResult,
    SaveWeightsForSamplerResult,
    SaveWeightsResult,
)
from store import runs as run_rows
from store import samplers, sessions
from store.checkpoints import set_checkpoint_expiry
from store.database import Store
from store.records import CheckpointKind, CheckpointRecord, OperationRecord, RunRecord
from store.slots import move_slot

SaveRequest = SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest


@dataclass(frozen=True, slots=True)
class _Saving:
    """What becomes of a saved folder: see `Submission.finish` and `Submission.also`."""

    finish: Callable[[OperationResult], Finished]
    also: Callable[[OperationRecord, OperationResult], Rows] | None = None


class Weights:
    """Accepts the requests that save and load weights. `capabilities` are those of the engine; `clock` is the time,
    aware UTC."""

    def __init__(
        self,
        *,
        store: Store,
        models: BaseModels,
        operations: Operations,
        runs: Runs,
        checkpoints: Checkpoints,
        capabilities: Capabilities,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._models = models
        self._operations = operations
        self._runs = runs
        self._checkpoints = checkpoints
        self._capabilities = capabilities
        self._clock = clock

    # -- saving --------------------------------------------------------------------------------------------------
    async def save(self, project_id: str, request: SaveWeightsRequest) -> OperationRecord:
        """Accept the saving of a training checkpoint.

        Raises: `NotFound`, `ModelLost`, `Gone`, `AlreadyExists`, `SeqIdConflict`.
        """
        run = await self._runs.owned(project_id, request.model_id)
        new = self._new(run, "training", request.path, request)
        return await self._accept_save("save_weights", run, request, new, self._training_saved(run, request, new))

    def _training_saved(self, run: RunRecord, request: SaveWeightsRequest, new: NewCheckpoint) -> _Saving:
        path = CheckpointPath(run.model_id, "training", request.path)

        def finish(outcome: OperationResult) -> Finished:
            rows = self._checkpoints.record_rows(new, _saved(outcome), with_optimizer=True)
            return json_result("save_weights", SaveWeightsResult(path=str(path)), rows)

        return _Saving(finish)

    async def save_for_sampler(self, project_id: str, request: SaveWeightsForSamplerRequest) -> OperationRecord:
        """Accept the saving of weights for sampling, named or ephemeral.

        An `inflight` save moves all inflight samplers of the model, earlier ones too, to its weights; snapshots stay.

        Raises: as `save`.
        """
        run = await self._runs.owned(project_id, request.model_id)
        new = self._new(run, "sampler", request.path, request)
        saving = self._sampler_saved(run, request, new)
        return await self._accept_save("save_weights_for_sampler", run, request, new, saving)

    def _sampler_saved(self, run: RunRecord, request: SaveWeightsForSamplerRequest, new: NewCheckpoint) -> _Saving:
        inflight = request.kind == "inflight"

        def finish_named(outcome: OperationResult) -> Finished:
            rows = self._checkpoints.record_rows(new, _saved(outcome), with_optimizer=False)
            path = CheckpointPath(run.model_id, "sampler", new.name or "")
            return json_result("save_weights_for_sampler", SaveWeightsForSamplerResult(path=str(path)), rows)

        def finish_ephemeral(outcome: OperationResult) -> Finished:
            record = self._checkpoints.record_rows(new, _saved(outcome), with_optimizer=False)
            seq_id = request.sampling_session_seq_id or 0
            sampler_id = sampler_id_of(run.session_id, seq_id)

            async def rows(db: AsyncSession) -> None:
                await record(db)
                session = await sessions.get_session(db, run.project_id, run.session_id)
                if session is None or session.state != "active":  # it ended meanwhile, and its weights with it
                    await set_checkpoint_expiry(db, new.checkpoint_id, self._clock())
                await samplers.create_sampler(
                    db,
                    sampler_id=sampler_id,
                    project_id=run.project_id,
                    session_id=run.session_id,
                    seq_id=seq_id,
                    base_model=run.base_model,
                    model_path=None,
                    checkpoint_id=None if inflight else new.checkpoint_id,
                    follows_model_id=run.model_id if inflight else None,
                    now=self._clock(),
                )

            result = SaveWeightsForSamplerResult(sampling_session_id=sampler_id)
            return json_result("save_weights_for_sampler", result, rows)

        def move(record: OperationRecord, _: OperationResult) -> Rows:
            async def rows(db: AsyncSession) -> None:
                await move_slot(db, run.model_id, record.seq_id or 0, new.checkpoint_id, self._clock())

            return rows

        finish = finish_ephemeral if request.path is None else finish_named
        return _Saving(finish, move if inflight else None)

    async def save_external(self, project_id: str, request: SaveWeightsExternalRequest) -> OperationRecord:
        """Accept an export of the adapter for other programs, encrypted if there are recipients.

        The worker writes plain files; they are encrypted and removed before the folder becomes a checkpoint, so no
        address ever led to them.

        Raises: as `save`, and `InvalidRequest` for a recipient that is none.
        """
        run = await self._runs.owned(project_id, request.model_id)
        recipients = parse_recipients(request.age_encryption_recipients or ())
        new = replace(self._new(run, "external", request.path, request), encrypted=bool(recipients))
        saving = self._export_saved(run, request, new)
        return await self._accept_save("save_weights_external", run, request, new, saving)

    def _export_saved(self, run: RunRecord, request: SaveWeightsExternalRequest, new: NewCheckpoint) -> _Saving:
        recipients = parse_recipients(request.age_encryption_recipients or ())
        path = CheckpointPath(run.model_id, "external", request.path)

        def finish(outcome: OperationResult) -> Finished:
            saved = _saved(outcome)
            if recipients:
                folder = self._checkpoints.folder_path(new.folder)
                saved = replace(saved, size_bytes=encrypt_folder(folder, EXPORTED_FILES, recipients))
                fail_point("export.encrypted")
            rows = self._checkpoints.record_rows(new, saved, with_optimizer=False)
            result = SaveWeightsExternalResult(path=str(path), size_bytes=saved.size_bytes)
            return json_result("save_weights_external", result, rows)

        return _Saving(finish)

    def _new(
        self,
        run: RunRecord,
        kind: CheckpointKind,
        name: str | None,
        request: SaveRequest,
    ) -> NewCheckpoint:
        checkpoint_id, folder = self._checkpoints.draw_folder()
        return NewCheckpoint(
            checkpoint_id=checkpoint_id,
            folder=folder,
            project_id=run.project_id,
            model_id=run.model_id,
            kind=kind,
            name=name,
            base_model=run.base_model,
            optimizer_type=optimizer_of(run),
            user_metadata=getattr(request, "user_metadata", None) or {},
            ttl_seconds=request.ttl_seconds,
            overwrite=getattr(request, "overwrite", False),
        )

    async def _accept_save(
        self, kind: str, run: RunRecord, request: SaveRequest, new: NewCheckpoint, saving: _Saving
    ) -> OperationRecord:
        run_guard = self._runs.guard(run.project_id, run.model_id)
        # What finishing needs if another process has to do it.
        context = {"request": request.model_dump_json(exclude_none=True), "checkpoint_id": new.checkpoint_id}
        operation = SaveWeights(folder=new.folder, with_optimizer=new.kind == "training")

        async def guard(db: AsyncSession) -> None:
            await run_guard(db)
            await self._checkpoints.refuse_taken_name(db, new)

        return await self._operations.accept(
            Submission(
                project_id=run.project_id,
                kind=kind,
                scope=model_scope(run.model_id),
                seq_id=request.seq_id,
                digest=_fingerprint(request),
                body=encode_operation(kind, operation, context),
                runtime=self._runs.runtime(run),
                model_id=run.model_id,
                guard=guard,
                finish=saving.finish,
                cleanup=lambda: self._checkpoints.remove_folder(new.folder),
                also=saving.also,
                writes=new.folder,
            )
        )

    def resume(self, record: OperationRecord, run: RunRecord, body: bytes) -> Submission:
        """A request that an earlier process accepted and did not finish, as it was submitted there.

        Raises `ValueError` (or what is one) if the stored form does not say enough.
        """
        runtime, model_id = self._runs.runtime(run), run.model_id
        operation, context = decode_operation(record.kind, body), decode_context(record.kind, body)
        if isinstance(operation, LoadWeights):
            path, reads = str(context["path"]), operation.folder
            if not operation.create:
                return resumed(record, runtime, model_id, _loaded(model_id, path), reads=reads)
            made, failed = _loaded_new(model_id, path), state_rows(model_id, "failed")
            return resumed(record, runtime, model_id, made, creates=True, failed=failed, reads=reads)
        if not isinstance(operation, SaveWeights):
            raise ValueError(f"{record.kind} is neither a save nor a load")
        new, saving = self._resumed_save(record.kind, run, str(context["request"]))
        new = replace(new, checkpoint_id=str(context["checkpoint_id"]), folder=operation.folder)
        more = saving(new)
        remove = partial(self._checkpoints.remove_folder, new.folder)
        also, writes = more.also, new.folder
        return resumed(record, runtime, model_id, more.finish, cleanup=remove, also=also, writes=writes)

    def _resumed_save(
        self, kind: str, run: RunRecord, text: str
    ) -> tuple[NewCheckpoint, Callable[[NewCheckpoint], _Saving]]:
        if kind == "save_weights":
            save = SaveWeightsRequest.model_validate_json(text)
            return self._new(run, "training", save.path, save), lambda new: self._training_saved(run, save, new)
        if kind == "save_weights_for_sampler":
            sampler = SaveWeightsForSamplerRequest.model_validate_json(text)
            return self._new(run, "sampler", sampler.path, sampler), lambda new: self._sampler_saved(run, sampler, new)
        export = SaveWeightsExternalRequest.model_validate_json(text)
        encrypted = bool(export.age_encryption_recipients)
        new = replace(self._new(run, "external", export.path, export), encrypted=encrypted)
        return new, lambda new: self._export_saved(run, export, new)

    # -- loading -------------------------------------------------------------------------------------------------
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
                reads=checkpoint.folder,
            )
        )

    async def _load_new(self, project_id: str, request: LoadWeightsRequest) -> tuple[OperationRecord, str]:
        session_id, model_seq_id = request.session_id or "", request.model_seq_id or 0
        await self._store.read(lambda db: require_active(db, project_id, session_id))
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

        async def guard(db: AsyncSession) -> None:
            await require_active(db, project_id, session_id)
            await run_rows.create_run(
                db,
                model_id=model_id,
                project_id=project_id,
                session_id=session_id,
                model_seq_id=model_seq_id,
                base_model=base_model,
                lora=checkpoint.lora,
                user_metadata=request.user_metadata or {},
                optimizer_type=optimizer,
                now=self._clock(),
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
                reads=checkpoint.folder,
                failed=state_rows(model_id, "failed"),
            )
        )
        return record, model_id

    async def _loadable(self, project_id: str, request: LoadWeightsRequest) -> CheckpointRecord:
        """The checkpoint to load. Raises `InvalidRequest` if the optimizer is asked of one that cannot have any."""
        token = request.weights_access_token
        allowed = await readers(self._store, project_id, token, field="weights_access_token")
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


def _loaded(model_id: str, path: str) -> Callable[[OperationResult], Finished]:
    return lambda _: json_result("load_weights", LoadWeightsResult(path=path, model_id=model_id))


def _loaded_new(model_id: str, path: str) -> Callable[[OperationResult], Finished]:
    def finish(outcome: OperationResult) -> Finished:
        lora = _saved(outcome).lora

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


def _fingerprint(request: SaveRequest) -> str:
    """What a repeat of a save is recognised by.

    Not by the number of an ephemeral sampler: the official client draws a new one whenever it sends the request again
    (`TrainingClient._save_weights_for_sampler_impl`). The first number counts.
    """
    if isinstance(request, SaveWeightsForSamplerRequest) and request.path is None:
        request = request.model_copy(update={"sampling_session_seq_id": 0})
    return request_digest(request)


def _saved(outcome: OperationResult) -> SavedAdapter:
    if not isinstance(outcome, SavedAdapter):
        raise EngineFailure("the worker did not report what it saved")
    return outcome
