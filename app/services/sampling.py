"""What the sampling requests mean: sampling sessions and samples.

Responsible for finding the weights of a sampler and for turning samples into operations. Not responsible for drawing
tokens (engines) or for batching (`workers/runtime.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import (
    CodecLimits,
    ParsedSample,
    decode_context,
    decode_operation,
    digest,
    encode_operation,
    sample_operation,
)
from app.services.base_models import BaseModels
from app.services.checkpoints import Checkpoints, refuse_export
from app.services.limits import check_sample
from app.services.operations import Finished, Operations, Submission, resumed, unreadable
from app.services.paths import direct_scope, is_direct, sampler_id_of, sequence_id_of
from app.services.runs import require_active, sampler_scope
from app.services.sample_results import KIND, sample_encoder
from app.services.sample_room import SampleRoom
from app.services.stability import Stability
from app.services.training import request_digest
from schemas.errors import Gone, InvalidRequest, NotFound, TinsmithError, TooManyRequests, Unavailable
from schemas.fail_points import fail_point
from schemas.operations import OperationResult, Sample, SampleDelta, SampleResult
from schemas.requests import CreateSamplingSessionRequest, SampleRequest
from store import checkpoints, samplers, slots
from store.bodies import Bodies
from store.database import Store
from store.operations import find_operation
from store.records import OperationRecord, SamplerRecord

logger = logging.getLogger(__name__)

MAX_MOVES = 20
"""How often the weights of a sampler may be replaced while one request for it is being accepted."""


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


@dataclass(frozen=True, slots=True)
class DirectWeights:
    """What a sample without a sampling session samples: a checkpoint and its folder name, or the base model."""

    base_model: str
    checkpoint_id: str | None = None
    folder: str | None = None


class _WeightsMoved(Exception):
    """A sampler got other weights between the look at them and the acceptance of a request."""


class Sampling:
    """Accepts sampling requests.

    Args:
        max_sample_tokens: tokens that the sequences of one sample may hold together.
        max_waiting_samples: samples of one project that may wait on one base model.
        clock: the time, aware UTC.
    """

    def __init__(
        self,
        *,
        store: Store,
        bodies: Bodies,
        models: BaseModels,
        operations: Operations,
        checkpoints: Checkpoints,
        stability: Stability,
        max_sample_tokens: int,
        max_waiting_samples: int,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._models = models
        self._operations = operations
        self._checkpoints = checkpoints
        self._stability = stability
        self._max_sample_tokens = max_sample_tokens
        self._room = SampleRoom(max_waiting_samples)
        self._clock = clock

    async def create_session(self, project_id: str, request: CreateSamplingSessionRequest) -> str:
        """Open a sampling session on a base model or a checkpoint; the same request again gives the same id.

        Raises: `NotFound` (session, checkpoint), `Gone`, `InvalidRequest` (base model), `SeqIdConflict`.
        """
        await self._store.read(lambda db: require_active(db, project_id, request.session_id))
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
        checkpoint = await self._checkpoints.readable((project_id,), request.model_path, field="model_path")
        refuse_export(checkpoint, field="model_path")
        wanted = request.base_model
        if wanted is not None and not self._models.same_source(wanted, checkpoint.base_model):
            raise InvalidRequest(
                f"base_model {wanted[:200]!r} is not that of the checkpoint, {checkpoint.base_model!r}",
                field="base_model",
            )
        return checkpoint.checkpoint_id, wanted or checkpoint.base_model

    async def sampler(self, project_id: str, sampler_id: str) -> SamplerView:
        """A sampler of this project. Raises `NotFound`."""
        record = await self._sampler(project_id, sampler_id, field="sampler_id")
        return SamplerView(record.sampler_id, record.base_model, record.model_path)

    async def join(self, project_id: str, sampler_id: str) -> int:
        """The number of one more client of a sampling session; the first is 0, and no number is given out twice.

        Raises: `NotFound` (sampler), `Gone` (session).
        """
        sampler = await self._sampler(project_id, sampler_id, field="sampling_session_id")

        async def rows(db: AsyncSession) -> int:
            await require_active(db, project_id, sampler.session_id)
            return await samplers.count_clone(db, sampler_id)

        return await self._store.write(rows)

    async def sample(self, project_id: str, request: SampleRequest, limits: CodecLimits) -> OperationRecord:
        """Accept one sample request. It keeps the weights that its sampler has at that moment to its end.

        Raises: `NotFound` (sampler, its weights), `Gone` (session), `InvalidRequest`, `SeqIdConflict`,
            `TooManyRequests` (too many samples of this project wait; a repeat of one that was accepted is answered).
        """
        for _ in range(MAX_MOVES):
            try:
                return await self._sample(project_id, request, limits)
            except _WeightsMoved:
                continue
        raise Unavailable("the weights of this sampler are being replaced faster than a request can be accepted")

    async def _sample(self, project_id: str, request: SampleRequest, limits: CodecLimits) -> OperationRecord:
        async def look(db: AsyncSession) -> tuple[SamplerRecord, SamplerWeights]:
            found = await _owned(db, project_id, request.sampling_session_id, field="sampling_session_id")
            return found, await self._sampled(db, found)

        sampler, weights = await self._store.read(look)
        runtime = self._models.runtime(sampler.base_model)
        try:
            with self._room.place(project_id, runtime):
                return await self._accept(project_id, request, limits, sampler, weights)
        except TooManyRequests:
            scope, seq_id = sampler_scope(sampler.sampler_id), request.seq_id
            if seq_id is None:
                raise
            if await self._store.read(lambda db: find_operation(db, project_id, scope, seq_id)) is None:
                raise
        return await self._accept(project_id, request, limits, sampler, weights)  # a repeat needs no place

    async def _accept(
        self,
        project_id: str,
        request: SampleRequest,
        limits: CodecLimits,
        sampler: SamplerRecord,
        weights: SamplerWeights,
    ) -> OperationRecord:
        runtime = self._models.runtime(sampler.base_model)
        parsed, body, fingerprint = await asyncio.to_thread(_decode, request, weights.folder, limits)
        check_sample(parsed.operation, runtime.info, self._max_sample_tokens)

        async def guard(db: AsyncSession) -> None:
            await require_active(db, project_id, sampler.session_id)
            if await self._sampled(db, sampler) != weights:
                raise _WeightsMoved

        return await self._operations.accept(
            Submission(
                project_id=project_id,
                kind=KIND,
                scope=sampler_scope(sampler.sampler_id),
                seq_id=request.seq_id,
                digest=fingerprint,
                body=body,
                runtime=runtime,
                model_id=None,
                guard=guard,
                finish=sample_encoder(parsed.operation, parsed.sparse_targets),
                checkpoint_id=weights.checkpoint_id,
                reads=weights.folder,
                also=self._stability.recorder(sampler.base_model, parsed.operation),
            )
        )

    async def direct_weights(self, project_id: str, model: str) -> DirectWeights:
        """The weights that a name means outside of sampling sessions: a served base model, or a `tinker://` path.

        Raises:
            NotFound: nothing of this name, or not readable by this project: the two look the same.
            InvalidRequest: an export for other programs.
        """
        if not model.startswith("tinker://"):
            if model not in self._models.runtimes:
                raise unknown_model(model)
            return DirectWeights(model)
        try:
            checkpoint = await self._checkpoints.readable((project_id,), model, field="model")
        except TinsmithError as error:
            if 400 <= error.status < 500:
                raise unknown_model(model) from None
            raise
        refuse_export(checkpoint, field="model")
        if checkpoint.base_model not in self._models.runtimes:
            raise unknown_model(model)
        return DirectWeights(checkpoint.base_model, checkpoint.checkpoint_id, checkpoint.folder)

    async def sample_directly(
        self,
        project_id: str,
        weights: DirectWeights,
        sample: Sample,
        *,
        progress: Callable[[SampleDelta], None] | None,
        finished: Callable[[SampleResult], None],
    ) -> OperationRecord:
        """Accept a sample that belongs to no sampling session: its client waits for it, and nobody asks again.

        Args:
            weights: from `direct_weights`; put into the sample here.
            progress: told what it draws, each token once; None = nobody listens.
            finished: given the result in a thread, before it is durable; perhaps more than once.

        Raises: `InvalidRequest` (it does not fit the base model), `NotFound` (the checkpoint is gone by now),
            `TooManyRequests` (too many samples of this project wait).
        """
        runtime = self._models.runtime(weights.base_model)
        sample = replace(sample, adapter_folder=weights.folder)
        check_sample(sample, runtime.info, self._max_sample_tokens)
        body = await asyncio.to_thread(encode_operation, KIND, sample)
        encode = sample_encoder(sample, False)

        def finish(outcome: OperationResult) -> Finished:
            if isinstance(outcome, SampleResult):
                finished(outcome)
            return encode(outcome)

        async def guard(db: AsyncSession) -> None:
            if weights.checkpoint_id is not None:
                found = await checkpoints.get_readable(db, project_id, weights.checkpoint_id)
                if found is None or self._checkpoints.expired(found):
                    raise NotFound("the weights of this model were deleted, or have expired", field="model")

        submission = Submission(
            project_id=project_id,
            kind=KIND,
            scope=direct_scope(project_id),
            seq_id=None,
            digest=digest(body),
            body=body,
            runtime=runtime,
            model_id=None,
            guard=guard,
            finish=finish,
            checkpoint_id=weights.checkpoint_id,
            reads=weights.folder,
            progress=progress,
        )
        with self._room.place(project_id, runtime):
            return await self._operations.accept(submission)

    async def resubmit(self, record: OperationRecord) -> None:
        """Run a sample again that an earlier process accepted and did not finish; a second run changes nothing.

        One without a sampling session fails: the connection that waited for it is gone.
        """
        if is_direct(record.scope):
            gone = Gone("the server was restarted, and nobody waits for this sample any more", code="cancelled")
            await self._operations.fail_now([record.request_id], gone)
            return
        sampler_id = record.scope.partition(":")[2]
        try:
            sampler = await self._sampler(record.project_id, sampler_id, field="sampling_session_id")
            runtime = self._models.runtime(sampler.base_model)
            body, operation = await self._read_back(record)
        except TinsmithError as error:
            await self._operations.fail_now([record.request_id], error)
            return
        sparse = bool(decode_context(KIND, body).get("sparse_targets"))
        also = self._stability.recorder(sampler.base_model, operation)
        encode, reads = sample_encoder(operation, sparse), operation.adapter_folder
        self._operations.dispatch(record, resumed(record, runtime, None, encode, also=also, reads=reads))

    async def _read_back(self, record: OperationRecord) -> tuple[bytes, Sample]:
        """A stored sample. Whatever is wrong is a `TinsmithError`: it must not keep the server from starting."""
        try:
            body = await self._bodies.get(record.body)
            operation = decode_operation(KIND, body)
            if not isinstance(operation, Sample):
                raise TypeError(f"{record.request_id} is logged as a sample, but holds a {type(operation).__name__}")
        except Exception as error:
            logger.exception("the stored sample %s cannot be read back", record.request_id)
            raise unreadable() from error
        return body, operation

    async def _sampler(self, project_id: str, sampler_id: str, *, field: str) -> SamplerRecord:
        return await self._store.read(lambda db: _owned(db, project_id, sampler_id, field=field))

    async def _sampled(self, db: AsyncSession, sampler: SamplerRecord) -> SamplerWeights:
        checkpoint_id = sampler.checkpoint_id
        if sampler.follows_model_id is not None:
            checkpoint_id = await slots.slot_checkpoint(db, sampler.follows_model_id)
        elif checkpoint_id is None:
            return SamplerWeights(None, None)
        checkpoint = None
        if checkpoint_id is not None:
            checkpoint = await checkpoints.get_readable(db, sampler.project_id, checkpoint_id)
        if checkpoint is None or self._checkpoints.expired(checkpoint):
            raise NotFound(
                f"the weights of sampling session {sampler.sampler_id!r} were deleted, replaced or made private, "
                "or have expired",
                field="sampling_session_id",
                code="weights_deleted",
            )
        return SamplerWeights(checkpoint.checkpoint_id, checkpoint.folder)


def unknown_model(name: str) -> NotFound:
    """One answer for a name that means nothing here and for what belongs to somebody else."""
    return NotFound(
        f"model {name[:300]!r} does not exist here",
        field="model",
        hint="GET models lists the names that are accepted",
        code="model_not_found",
    )


async def _owned(db: AsyncSession, project_id: str, sampler_id: str, *, field: str) -> SamplerRecord:
    record = await samplers.get_sampler(db, project_id, sampler_id)
    if record is None:
        raise NotFound(f"no sampling session {sampler_id[:200]!r}", field=field)
    return record


def _decode(request: SampleRequest, folder: str | None, limits: CodecLimits) -> tuple[ParsedSample, bytes, str]:
    """The operation, its stored form and what a repeat is recognised by: slow for a long prompt, so for a thread."""
    parsed = sample_operation(request, adapter_folder=folder, limits=limits)
    return (
        parsed,
        encode_operation(KIND, parsed.operation, {"sparse_targets": parsed.sparse_targets}),
        request_digest(request),
    )


def sequence_ids(record: OperationRecord, num_samples: int) -> list[str]:
    """One id per sample of a request, the same for every repeat of it."""
    return [sequence_id_of(record.scope, record.seq_id, index) for index in range(num_samples)]
