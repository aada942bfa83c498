"""Sampling sessions: which weights a client samples by an id of its own.

Responsible for opening them, finding them, and for the weights that each has at one moment: some follow a training run.
Not responsible for samples (`sampling`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.base_models import BaseModels
from app.services.checkpoints import Checkpoints, refuse_export
from app.services.paths import sampler_id_of
from app.services.runs import require_active
from schemas.errors import InvalidRequest, NotFound
from schemas.fail_points import fail_point
from schemas.requests import CreateSamplingSessionRequest
from store import checkpoints, samplers, slots
from store.database import Store
from store.records import SamplerRecord


@dataclass(frozen=True, slots=True)
class SamplerView:
    """A sampler as its owner sees it. `model_path` None = the base model, or weights without a name."""

    sampler_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    """What a sampler samples at one moment: a checkpoint and its folder name, or the base model (both None)."""

    checkpoint_id: str | None
    folder: str | None


class Samplers:
    """The sampling sessions of all projects."""

    def __init__(self, store: Store, models: BaseModels, saved: Checkpoints, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._models = models
        self._saved = saved
        self._clock = clock

    async def open(self, project_id: str, request: CreateSamplingSessionRequest) -> str:
        """Open a sampling session on a base model or a checkpoint; the same request again gives the same id.

        Raises: `NotFound` (session, checkpoint), `Gone`, `InvalidRequest` (base model), `SeqIdConflict`.
        """
        await self._store.look_up(lambda db: require_active(db, project_id, request.session_id))
        checkpoint_id, base_model = await self._weights(project_id, request)
        self._models.runtime(base_model)
        sampler_id = sampler_id_of(request.session_id, request.sampling_session_seq_id)

        async def rows(db: AsyncSession) -> SamplerRecord:
            await require_active(db, project_id, request.session_id)
            return await samplers.create_sampler(
                db,
                sampler_id=sampler_id,
                project_id=project_id,
                session_id=request.session_id,
                seq_id=request.sampling_session_seq_id,
                base_model=base_model,
                model_path=request.model_path,
                checkpoint_id=checkpoint_id,
                now=self._clock(),
            )

        created = await self._store.write(rows)
        fail_point("sampler.created")
        return created.sampler_id

    async def _weights(self, project_id: str, request: CreateSamplingSessionRequest) -> tuple[str | None, str]:
        if request.model_path is None:
            return None, request.base_model or ""
        checkpoint = await self._saved.readable((project_id,), request.model_path, field="model_path")
        refuse_export(checkpoint, field="model_path")
        wanted = request.base_model
        if wanted is not None and not self._models.same_source(wanted, checkpoint.base_model):
            raise InvalidRequest(
                f"base_model {wanted[:200]!r} is not that of the checkpoint, {checkpoint.base_model!r}",
                field="base_model",
            )
        return checkpoint.checkpoint_id, wanted or checkpoint.base_model

    async def view(self, project_id: str, sampler_id: str) -> SamplerView:
        """A sampler of this project. Raises `NotFound`."""
        record = await self.record(project_id, sampler_id, field="sampler_id")
        return SamplerView(record.sampler_id, record.base_model, record.model_path)

    async def join(self, project_id: str, sampler_id: str) -> int:
        """The number of one more client of a sampling session; the first is 0, and no number is given out twice.

        Raises: `NotFound` (sampler), `Gone` (session).
        """
        sampler = await self.record(project_id, sampler_id, field="sampling_session_id")

        async def rows(db: AsyncSession) -> int:
            await require_active(db, project_id, sampler.session_id)
            return await samplers.count_clone(db, sampler_id)

        return await self._store.write(rows)

    async def record(self, project_id: str, sampler_id: str, *, field: str) -> SamplerRecord:
        """The row of a sampler of this project; `field` names the id in the error. Raises `NotFound`."""
        return await self._store.look_up(lambda db: find_sampler(db, project_id, sampler_id, field=field))

    async def weights(self, db: AsyncSession, sampler: SamplerRecord) -> SamplerWeights:
        """What a sampler samples at this moment of the transaction. Raises `NotFound`: they are there no more."""
        checkpoint_id = sampler.checkpoint_id
        if sampler.follows_model_id is not None:
            checkpoint_id = await slots.slot_checkpoint(db, sampler.follows_model_id)
        elif checkpoint_id is None:
            return SamplerWeights(None, None)
        checkpoint = None
        if checkpoint_id is not None:
            checkpoint = await checkpoints.get_readable(db, sampler.project_id, checkpoint_id)
        if checkpoint is None or self._saved.expired(checkpoint):
            raise NotFound(
                f"the weights of sampling session {sampler.sampler_id!r} were deleted, replaced or made private, "
                "or have expired",
                field="sampling_session_id",
                code="weights_deleted",
            )
        return SamplerWeights(checkpoint.checkpoint_id, checkpoint.folder)


async def find_sampler(db: AsyncSession, project_id: str, sampler_id: str, *, field: str) -> SamplerRecord:
    """The row of a sampler of a project; `field` names the id in the error. Raises `NotFound`."""
    record = await samplers.get_sampler(db, project_id, sampler_id)
    if record is None:
        raise NotFound(f"no sampling session {sampler_id[:200]!r}", field=field)
    return record
