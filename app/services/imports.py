"""Adapters that come in from elsewhere: a PEFT adapter becomes a training checkpoint without optimizer state.

Responsible for the way from an uploaded file to a checkpoint, and for leaving nothing behind where there is none. Not
responsible for reading the upload (`app/codec/multipart.py`) or for what an adapter must be (`engines/peft_import.py`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.base_models import BaseModels
from app.services.checkpoints import Checkpoints
from app.services.limit_charges import check_storage
from app.services.paths import CheckpointPath, model_id_of, parse_path
from app.services.tenant_limits import TenantLimits
from app.services.training import request_digest
from engines.peft_config import read_config
from engines.peft_import import ForeignAdapter, open_adapter, write_folder
from schemas.errors import EngineFailure, Gone, InvalidRequest, SeqIdConflict, TinsmithError, Unavailable
from schemas.operations import LoraSpec
from schemas.requests import ImportCheckpointRequest
from store import checkpoints as rows
from store import operations as log
from store import runs, sessions
from store.artifacts import ArtifactStore
from store.database import Store, Work
from store.events import add_event
from store.files import fsync_folder
from store.records import CheckpointRecord, NewOperation, OperationRecord

KIND = "import_checkpoint"
MAX_UPLOADS = 4
"""Uploads at a time, all projects together; a project gets one."""
SPARE_BYTES = 256 << 20
"""What an upload must leave free on the disk."""
_TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload under way: where the checkpoint will be, and the file that takes the adapter until then."""

    checkpoint_id: str
    folder: str
    workplace: Path
    file: BinaryIO

    @property
    def path(self) -> Path:
        """The uploaded file."""
        return self.workplace / "upload"


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """Who brings an adapter in, and as what. `file_sha256` is of the uploaded file; `idempotency_key` None: a request
    is new each time."""

    project_id: str
    key_id: str
    request: ImportCheckpointRequest
    file_sha256: str
    idempotency_key: str | None


class Imports:
    """Brings adapters in.

    Args:
        limits: of projects and keys.
        max_rank: the largest that is accepted.
        new_id: makes ids of at least 128 random bits.
        clock: the time, aware UTC.
    """

    def __init__(
        self,
        store: Store,
        models: BaseModels,
        checkpoints: Checkpoints,
        artifacts: ArtifactStore,
        *,
        limits: TenantLimits,
        max_rank: int,
        new_id: Callable[[], str],
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._models = models
        self._checkpoints = checkpoints
        self._artifacts = artifacts
        self._limits = limits
        self._max_rank = max_rank
        self._new_id = new_id
        self._clock = clock
        self._uploading: set[str] = set()

    @contextmanager
    def receiving(self, project_id: str, declared: int) -> Iterator[Upload]:
        """A place for an upload of `declared` bytes (0: not known); whatever is left of it goes at the end.

        Raises:
            Unavailable: too many uploads are under way, or the disk has no room.
        """
        if project_id in self._uploading or len(self._uploading) >= MAX_UPLOADS:
            raise Unavailable("another adapter is being brought in", hint="send this one when that is done")
        checkpoint_id, folder = self._checkpoints.draw_folder()
        workplace = self._checkpoints.folder_path(folder)
        workplace = workplace.with_name(f".{folder}.{secrets.token_hex(8)}.tmp")
        self._uploading.add(project_id)
        try:
            if shutil.disk_usage(workplace.parent).free < 2 * declared + SPARE_BYTES:
                raise Unavailable("the server's disk has no room for this adapter", hint="delete checkpoints first")
            workplace.mkdir(mode=0o700)
            with (workplace / "upload").open("xb") as file:
                yield Upload(checkpoint_id, folder, workplace, file)
        except OSError as error:
            raise _not_written(error) from error
        finally:
            self._uploading.discard(project_id)
            shutil.rmtree(workplace, ignore_errors=True)

    async def make(self, order: ImportOrder, upload: Upload) -> CheckpointRecord:
        """Turn a complete upload into a checkpoint: all of it, or nothing.

        It belongs to a new training run that cannot be trained on, as a copy does; it is loaded or sampled by its path.
        Once its files are written, it is made whether the caller is cancelled or not.

        Returns:
            The checkpoint; for a repeat, the first one.

        Raises:
            InvalidRequest: a field of the request, a key of the configuration or a tensor is not acceptable.
            Unavailable: the base model is still loading. `SeqIdConflict`: the key was used for another request.
            EngineFailure: the disk or the object storage does not take it.
            OverLimit: it does not fit into the bytes that checkpoints may take.
        """
        scope = f"import:{order.project_id}:{order.idempotency_key or self._new_id()}"
        known = await self._store.look_up(lambda db: log.find_operation(db, order.project_id, scope, 0))
        if known is not None:
            return await self._again(order, known)
        effective = await self._limits.effective(order.project_id, order.key_id)
        try:
            adapter, base_model = await self._opened(order.request, upload)
            size = await asyncio.to_thread(_written, adapter, upload, self._artifacts.path(upload.folder), base_model)
        except OSError as error:
            raise _not_written(error) from error

        async def write(db: AsyncSession) -> tuple[OperationRecord, bool]:
            record, created = await self._record(db, order, upload, scope, adapter.spec, base_model, size)
            if created and effective is not None:
                await check_storage(db, effective)
            return record, created

        record = await asyncio.shield(asyncio.create_task(self._recorded(upload.folder, write)))
        return await self._again(order, record)

    async def _recorded(self, folder: str, write: Work[tuple[OperationRecord, bool]]) -> OperationRecord:
        """Publish a written folder and write its rows, or remove it."""
        try:
            await self._artifacts.publish(folder)
        except Exception:
            await self._checkpoints.remove_folder(folder)
            raise
        return await self._checkpoints.record_folder(folder, write)

    async def _opened(self, request: ImportCheckpointRequest, upload: Upload) -> tuple[ForeignAdapter, str]:
        """The adapter as far as its header tells, and the name of the base model that it is for."""
        config = read_config(request.adapter_config, max_rank=self._max_rank)
        base_model = request.base_model or config.base_model
        if base_model is None:
            raise InvalidRequest("base_model is missing, and adapter_config does not name one", field="base_model")
        info = self._models.runtime(base_model).info
        if info is None:
            raise Unavailable(f"the base model {base_model!r} is not loaded yet", hint="try again in a moment")
        return await asyncio.to_thread(open_adapter, upload.path, config, info.linears), base_model

    async def _again(self, order: ImportOrder, record: OperationRecord) -> CheckpointRecord:
        if (record.kind, record.digest) != (KIND, _digest(order)):
            raise SeqIdConflict("this X-Idempotency-Key was used before with another request")
        if not isinstance(record.result, bytes):
            raise Gone("this request was answered long ago, and its answer is not kept any more")
        path = parse_path(record.result.decode(), field="path")
        return await self._checkpoints.find(order.project_id, path)

    async def _record(
        self,
        db: AsyncSession,
        order: ImportOrder,
        upload: Upload,
        scope: str,
        lora: LoraSpec,
        base_model: str,
        size: int,
    ) -> tuple[OperationRecord, bool]:
        """The rows of a written folder, all or none; False if another request was first."""
        request, now, project_id = order.request, self._clock(), order.project_id
        new = NewOperation(
            request_id=self._new_id(),
            project_id=project_id,
            kind=KIND,
            scope=scope,
            seq_id=0,
            digest=_digest(order),
            body=b"",
            created_at=now,
        )
        record, created = await log.append(db, new)
        if not created:
            return record, False
        model_id = await self._run(db, order, base_model, lora, now)
        await rows.create_checkpoint(
            db,
            checkpoint_id=upload.checkpoint_id,
            project_id=project_id,
            model_id=model_id,
            kind="training",
            name=request.name,
            folder=upload.folder,
            size_bytes=size,
            base_model=base_model,
            lora=lora,
            has_optimizer=False,
            user_metadata=request.user_metadata or {},
            expires_at=None if request.ttl_seconds is None else now + timedelta(seconds=request.ttl_seconds),
            now=now,
            overwrite=False,
            by=order.key_id,
        )
        details: dict[str, Any] = {"model_id": model_id, "kind": "training", "name": request.name}
        await add_event(db, project_id, "checkpoint_imported", now, {**details, "key_id": order.key_id})
        path = CheckpointPath(model_id, "training", request.name)
        await log.finish(db, record.request_id, str(path).encode(), _TEXT, now)
        done = await log.get_operation(db, project_id, record.request_id)
        assert done is not None  # written two lines above, in this transaction
        return done, True

    async def _run(self, db: AsyncSession, order: ImportOrder, base_model: str, lora: LoraSpec, now: datetime) -> str:
        """The run that owns the checkpoint, closed from the beginning, in a session of its own."""
        made = await sessions.create_session(
            db,
            session_id=secrets.token_hex(16),
            project_id=order.project_id,
            tags=(),
            user_metadata={"import": order.request.name},
            sdk_version=None,
            display_name="imported weights",
            idempotency_key=None,
            now=now,
            by=order.key_id,
        )
        await sessions.finish_session(db, order.project_id, made.session_id, "success", None, now, by=order.key_id)
        model_id = model_id_of(made.session_id, 0)
        await runs.create_run(
            db,
            model_id=model_id,
            project_id=order.project_id,
            session_id=made.session_id,
            model_seq_id=0,
            base_model=base_model,
            lora=lora,
            user_metadata={},
            optimizer_type="adamw",
            now=now,
            key_id=order.key_id,
        )
        await runs.set_run_state(db, model_id, "closed")
        return model_id


def _written(adapter: ForeignAdapter, upload: Upload, target: Path, base_model: str) -> int:
    """Write the checkpoint's folder whole beside its place, and rename it there; its size in bytes. Blocks."""
    whole = upload.workplace / "whole"
    whole.mkdir(mode=0o700)
    size = write_folder(adapter, whole, base_model)
    fsync_folder(whole)
    whole.rename(target)
    try:
        fsync_folder(target.parent)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)  # it could vanish with the next power failure
        raise
    return size


def _digest(order: ImportOrder) -> str:
    return f"{request_digest(order.request)}:{order.file_sha256}"


def _not_written(error: OSError) -> TinsmithError:
    reason = os.strerror(error.errno) if error.errno else "input/output error"
    return EngineFailure(
        f"the adapter could not be written: {reason}",
        hint="nothing was kept of it; send it again when the server's disk takes it",
        code="checkpoint_not_written",
    )
