"""Copies of checkpoints: into another session, or out of another project. A copy outlives its source.

Responsible for whose checkpoint may be copied where, and for making one copy however often the same request comes. Not
responsible for files (`store/artifacts.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.access import AccessTokens
from app.services.checkpoints import Checkpoints, path_of
from app.services.limit_charges import check_storage
from app.services.paths import CheckpointPath, model_id_of
from app.services.runs import require_active
from app.services.tenant_limits import Effective, TenantLimits
from app.services.training import creation_scope, request_digest
from schemas.errors import Gone, NotFound, SeqIdConflict
from schemas.fail_points import fail_point
from schemas.requests import CopyWeightsRequest
from store import checkpoints as rows
from store import operations as log
from store import runs, sessions
from store.database import Store
from store.events import add_event
from store.records import CheckpointRecord, NewOperation, OperationRecord

KIND = "copy_weights"
TOKEN_HEADER = "X-Tinker-Weights-Access-Token"
_TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Who asks for a copy, with what rights, and how a repeat is recognised.

    `idempotency_key` None: a request into a project is then new each time. One that names its place in a session is
    recognised by that place.
    """

    project_id: str
    key_id: str
    request: CopyWeightsRequest
    access_token: str | None
    idempotency_key: str | None


class Copies:
    """Copies checkpoints.

    Args:
        access: opens the projects of access tokens.
        limits: of projects and keys.
        new_id: makes ids of at least 128 random bits.
        clock: the time, aware UTC.
    """

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        *,
        access: AccessTokens,
        limits: TenantLimits,
        new_id: Callable[[], str],
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._access = access
        self._limits = limits
        self._new_id = new_id
        self._clock = clock

    async def copy(self, order: CopyOrder) -> str:
        """Copy a checkpoint of the asking project, or of the project whose key is the access token.

        The copy keeps the kind and the name, and belongs to a new training run that cannot be trained on. It is not
        public and does not inherit the time to live. Once its files are being made, it is made whether the caller is
        cancelled or not.

        Returns:
            The path of the copy; for a repeat, that of the first one.

        Raises:
            NotFound: no such checkpoint to read, project or session.
            InvalidRequest: the token is not a key, or may not copy.
            SeqIdConflict: the place or the key was used for another request.
            Gone: the session is over.
            OverLimit: the copy does not fit into the bytes that checkpoints may take.
        """
        request = order.request
        if request.destination_project_id not in (None, order.project_id):
            raise NotFound(
                f"there is no project {request.destination_project_id!r} for this key",
                field="destination_project_id",
                hint="a copy goes into the project of the API key; another one's checkpoint is read by an access token",
            )
        scope, seq_id = self._place(order)
        known = await self._store.look_up(lambda db: log.find_operation(db, order.project_id, scope, seq_id))
        if known is not None:
            return _answer(known, request_digest(request))
        if request.session_id is not None:
            session_id = request.session_id
            await self._store.look_up(lambda db: require_active(db, order.project_id, session_id))
        token = order.access_token
        allowed = await self._access.readers(order.project_id, token, field=TOKEN_HEADER, needs="checkpoints")
        source = await self._checkpoints.owned_by(allowed, request.source_path, field="source_path")
        effective = await self._limits.effective(order.project_id, order.key_id)
        record = await asyncio.shield(asyncio.create_task(self._make(order, source, scope, seq_id, effective)))
        return _answer(record, request_digest(request))

    async def _make(
        self, order: CopyOrder, source: CheckpointRecord, scope: str, seq_id: int, effective: Effective | None
    ) -> OperationRecord:
        """The files and rows of a copy; of a repeat, those of the first one."""
        checkpoint_id, folder = self._checkpoints.draw_folder()
        await self._checkpoints.copy_folder(source.folder, folder)
        fail_point("copy.linked")

        async def write(db: AsyncSession) -> tuple[OperationRecord, bool]:
            record, created = await self._record(db, order, source, scope, seq_id, checkpoint_id, folder)
            if created and effective is not None:
                await check_storage(db, effective)
            return record, created

        record = await self._checkpoints.record_folder(folder, write)
        fail_point("copy.recorded")
        return record

    def _place(self, order: CopyOrder) -> tuple[str, int]:
        """The natural key of the request in the operation log."""
        request = order.request
        if request.session_id is not None:
            return creation_scope(request.session_id), request.model_seq_id or 0
        return f"copy:{order.project_id}:{order.idempotency_key or self._new_id()}", 0

    async def _record(
        self,
        db: AsyncSession,
        order: CopyOrder,
        source: CheckpointRecord,
        scope: str,
        seq_id: int,
        checkpoint_id: str,
        folder: str,
    ) -> tuple[OperationRecord, bool]:
        """The rows of a copied folder, all or none; False if another request was first."""
        request, now = order.request, self._clock()
        new = NewOperation(
            request_id=self._new_id(),
            project_id=order.project_id,
            kind=KIND,
            scope=scope,
            seq_id=seq_id,
            digest=request_digest(request),
            body=b"",
            created_at=now,
        )
        record, created = await log.append(db, new)
        if not created:
            return record, False
        if await rows.get_checkpoint(db, source.project_id, source.checkpoint_id) is None:  # so its files may be going
            raise NotFound(f"there is no checkpoint {request.source_path!r}", field="source_path")
        run_id = await self._run(db, order, source, now)
        path = CheckpointPath(run_id, source.kind, source.name or "")
        await rows.create_checkpoint(
            db,
            checkpoint_id=checkpoint_id,
            project_id=order.project_id,
            model_id=run_id,
            kind=source.kind,
            name=source.name,
            folder=folder,
            size_bytes=source.size_bytes,
            base_model=source.base_model,
            lora=source.lora,
            has_optimizer=source.has_optimizer,
            encrypted=source.encrypted,
            optimizer_type=source.optimizer_type,
            user_metadata=source.user_metadata,
            expires_at=None if request.ttl_seconds is None else now + timedelta(seconds=request.ttl_seconds),
            now=now,
            overwrite=False,
            by=order.key_id,
        )
        details = {"model_id": run_id, "kind": source.kind, "name": source.name, "key_id": order.key_id}
        await add_event(db, order.project_id, "checkpoint_copied", now, {**details, "source": str(path_of(source))})
        await log.finish(db, record.request_id, str(path).encode(), _TEXT, now)
        done = await log.get_operation(db, order.project_id, record.request_id)
        assert done is not None  # written two lines above, in this transaction
        return done, True

    async def _run(self, db: AsyncSession, order: CopyOrder, source: CheckpointRecord, now: datetime) -> str:
        """The run that owns the copy, closed from the beginning; in a session of its own unless one was named."""
        session_id, model_seq_id = order.request.session_id, order.request.model_seq_id or 0
        if session_id is not None:
            await require_active(db, order.project_id, session_id)
        else:
            session_id = await self._session(db, order, now)
        origin = await runs.get_run(db, order.project_id, source.model_id)  # None if it is another project's
        model_id = model_id_of(session_id, model_seq_id)
        await runs.create_run(
            db,
            model_id=model_id,
            project_id=order.project_id,
            session_id=session_id,
            model_seq_id=model_seq_id,
            base_model=source.base_model,
            lora=source.lora,
            user_metadata={} if origin is None else origin.user_metadata,
            optimizer_type=source.optimizer_type,
            now=now,
            key_id=order.key_id,
        )
        await runs.set_run_state(db, model_id, "closed")
        return model_id

    async def _session(self, db: AsyncSession, order: CopyOrder, now: datetime) -> str:
        made = await sessions.create_session(
            db,
            session_id=secrets.token_hex(16),
            project_id=order.project_id,
            tags=(),
            user_metadata={"copy_of": order.request.source_path},
            sdk_version=None,
            display_name="copied weights",
            idempotency_key=None,
            now=now,
            by=order.key_id,
        )
        await sessions.finish_session(db, order.project_id, made.session_id, "success", None, now, by=order.key_id)
        return made.session_id


def _answer(record: OperationRecord, digest: str) -> str:
    if (record.kind, record.digest) != (KIND, digest):
        raise SeqIdConflict(
            "this X-Idempotency-Key, or this model_seq_id of the session, was used before with another request"
        )
    if not isinstance(record.result, bytes):
        raise Gone("this request was answered long ago, and its answer is not kept any more")
    return record.result.decode()
