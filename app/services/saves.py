"""What saving means: checkpoints of a run, weights for sampling, exports for other programs.

Responsible for the requests `save_weights`, `save_weights_for_sampler` and `save_weights_external`. Not responsible for
checkpoint rows (`checkpoints.py`), for the log (`operations.py`) or for what is in a folder (engines).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import decode_context, decode_operation, encode_operation
from app.services.age_encryption import encrypt_folder, parse_recipients
from app.services.caller import calling_key
from app.services.checkpoints import Checkpoints, NewCheckpoint
from app.services.exports import EXPORTED_FILES
from app.services.operations import Operations
from app.services.paths import CheckpointPath, sampler_id_of
from app.services.runs import Runs, model_scope, optimizer_of
from app.services.submission import Finished, Rows, Submission, resumed
from app.services.tenant_limits import Cost
from app.services.training import json_result, request_digest
from schemas.errors import EngineFailure
from schemas.fail_points import fail_point
from schemas.operations import OperationResult, SavedAdapter, SaveWeights
from schemas.requests import (
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from schemas.responses import (
    SaveWeightsExternalResult,
    SaveWeightsForSamplerResult,
    SaveWeightsResult,
)
from store import samplers, sessions
from store.checkpoints import set_checkpoint_expiry
from store.records import CheckpointKind, OperationRecord, RunRecord
from store.slots import move_slot

SaveRequest = SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest


@dataclass(frozen=True, slots=True)
class _Saving:
    """What becomes of a saved folder: see `Submission.finish` and `Submission.also`."""

    finish: Callable[[OperationResult], Finished]
    also: Callable[[OperationRecord, OperationResult], Rows] | None = None


class Saves:
    """Accepts the requests that save weights. `clock` is the time, aware UTC."""

    def __init__(
        self,
        *,
        operations: Operations,
        runs: Runs,
        checkpoints: Checkpoints,
        clock: Callable[[], datetime],
    ) -> None:
        self._operations = operations
        self._runs = runs
        self._checkpoints = checkpoints
        self._clock = clock

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
            rows = self._checkpoints.record_rows(new, saved_adapter(outcome), with_optimizer=True)
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
            rows = self._checkpoints.record_rows(new, saved_adapter(outcome), with_optimizer=False)
            path = CheckpointPath(run.model_id, "sampler", new.name or "")
            return json_result("save_weights_for_sampler", SaveWeightsForSamplerResult(path=str(path)), rows)

        def finish_ephemeral(outcome: OperationResult) -> Finished:
            record = self._checkpoints.record_rows(new, saved_adapter(outcome), with_optimizer=False)
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
            saved = saved_adapter(outcome)
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
            key_id=calling_key(),
        )

    async def _accept_save(
        self, kind: str, run: RunRecord, request: SaveRequest, new: NewCheckpoint, saving: _Saving
    ) -> OperationRecord:
        run_guard = self._runs.guard(run.project_id, run.model_id)
        # What finishing needs if another process has to do it.
        asked = request.model_dump_json(exclude_none=True)
        context = {"request": asked, "checkpoint_id": new.checkpoint_id, "key_id": new.key_id}
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
                cost=Cost(stores=True),
            )
        )

    def resume(self, record: OperationRecord, run: RunRecord, body: bytes) -> Submission:
        """A save that an earlier process accepted and did not finish, as it was submitted there.

        Raises `ValueError` (or what is one) if the stored form does not say enough.
        """
        runtime, model_id = self._runs.runtime(run), run.model_id
        operation, context = decode_operation(record.kind, body), decode_context(record.kind, body)
        if not isinstance(operation, SaveWeights):
            raise ValueError(f"{record.kind} is no save")
        new, saving = self._resumed_save(record.kind, run, str(context["request"]))
        key_id = context.get("key_id")
        by = None if key_id is None else str(key_id)
        new = replace(new, checkpoint_id=str(context["checkpoint_id"]), folder=operation.folder, key_id=by)
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


def _fingerprint(request: SaveRequest) -> str:
    """What a repeat of a save is recognised by.

    Not by the number of an ephemeral sampler: the official client draws a new one whenever it sends the request again
    (`TrainingClient._save_weights_for_sampler_impl`). The first number counts.
    """
    if isinstance(request, SaveWeightsForSamplerRequest) and request.path is None:
        request = request.model_copy(update={"sampling_session_seq_id": 0})
    return request_digest(request)


def saved_adapter(outcome: OperationResult) -> SavedAdapter:
    """What a worker has saved or loaded. Raises `EngineFailure` if it did not tell."""
    if not isinstance(outcome, SavedAdapter):
        raise EngineFailure("the worker did not report what it saved")
    return outcome
