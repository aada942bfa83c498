"""What the sampling requests mean: samples become operations.

Responsible for accepting samples, with a sampling session and without one. Not responsible for sampling sessions and
their weights (`samplers`), for drawing tokens (engines) or for batching (`workers/sampling_lane.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from app.services.caller import calling_key
from app.services.checkpoints import Checkpoints, refuse_export
from app.services.limits import check_sample
from app.services.operations import Operations, unreadable
from app.services.paths import direct_scope, is_direct, sequence_id_of
from app.services.runs import require_active, sampler_scope
from app.services.sample_results import KIND, sample_encoder
from app.services.sample_room import SampleRoom
from app.services.samplers import Samplers, SamplerWeights, find_sampler
from app.services.stability import Stability
from app.services.submission import Finished, Submission, resumed
from app.services.tenant_limits import Cost, TenantLimits
from app.services.training import request_digest
from schemas.errors import Gone, NotFound, NotNow, TinsmithError, TooManyRequests, Unavailable
from schemas.operations import OperationResult, Sample, SampleDelta, SampleResult
from schemas.requests import SampleRequest
from store import checkpoints
from store.bodies import Bodies
from store.database import Store
from store.operations import find_operation
from store.records import OperationRecord, SamplerRecord
from workers.runtime_protocol import Runtime

logger = logging.getLogger(__name__)

MAX_MOVES = 20
"""How often the weights of a sampler may be replaced while one request for it is being accepted."""
DIRECT_PATIENCE = 60.0
"""Seconds for which a limit may hold back a sample whose client waits on an open connection."""


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
        limits: of projects and keys.
    """

    def __init__(
        self,
        *,
        store: Store,
        bodies: Bodies,
        models: BaseModels,
        operations: Operations,
        checkpoints: Checkpoints,
        samplers: Samplers,
        stability: Stability,
        max_sample_tokens: int,
        max_waiting_samples: int,
        limits: TenantLimits,
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._models = models
        self._operations = operations
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._stability = stability
        self._max_sample_tokens = max_sample_tokens
        self._room = SampleRoom(max_waiting_samples)
        self._limits = limits

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
            found = await find_sampler(db, project_id, request.sampling_session_id, field="sampling_session_id")
            return found, await self._samplers.weights(db, found)

        sampler, weights = await self._store.look_up(look)
        runtime = self._models.runtime(sampler.base_model)
        try:
            with self._room.place(project_id, runtime, self._operations.samples_held(project_id, runtime)):
                return await self._accept(project_id, request, limits, sampler, weights)
        except TooManyRequests:
            scope, seq_id = sampler_scope(sampler.sampler_id), request.seq_id
            if seq_id is None:
                raise
            if await self._store.look_up(lambda db: find_operation(db, project_id, scope, seq_id)) is None:
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
        longest = await self._limits.context_length(project_id, calling_key())
        parsed, body, fingerprint = await asyncio.to_thread(_decode, request, weights.folder, limits, longest)
        check_sample(parsed.operation, runtime.info, self._max_sample_tokens)

        async def guard(db: AsyncSession) -> None:
            await require_active(db, project_id, sampler.session_id)
            if await self._samplers.weights(db, sampler) != weights:
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
                cost=_cost(parsed.operation, runtime),
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
        longest = await self._limits.context_length(project_id, calling_key())
        sample = _within(replace(sample, adapter_folder=weights.folder), longest)
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
            cost=_cost(sample, runtime),
            patience=DIRECT_PATIENCE,
        )
        with self._room.place(project_id, runtime, self._operations.samples_held(project_id, runtime)):
            return await self._operations.accept(submission)

    async def resubmit(self, record: OperationRecord) -> bool:
        """Run a sample again that an earlier process accepted and did not finish; a second run changes nothing.

        One without a sampling session fails: the connection that waited for it is gone. One whose base model is not
        served now waits in the log. Returns whether it runs. Raises `Unavailable` if it cannot be read for the moment.
        """
        if is_direct(record.scope):
            gone = Gone("the server was restarted, and nobody waits for this sample any more", code="cancelled")
            await self._operations.settling.fail_now([record.request_id], gone)
            return False
        sampler_id = record.scope.partition(":")[2]
        try:
            sampler = await self._samplers.record(record.project_id, sampler_id, field="sampling_session_id")
            runtime = self._models.runtimes.get(sampler.base_model)
            if runtime is None:
                await self._store.look_up(lambda db: require_active(db, record.project_id, sampler.session_id))
                self._operations.left.note_unserved(record.request_id, sampler.base_model, sampler.session_id)
                return False
            body, operation = await self._read_back(record)
        except Unavailable:
            raise
        except TinsmithError as error:
            await self._operations.settling.fail_now([record.request_id], error)
            return False
        sparse = bool(decode_context(KIND, body).get("sparse_targets"))
        also = self._stability.recorder(sampler.base_model, operation)
        encode, reads = sample_encoder(operation, sparse), operation.adapter_folder
        cost = _cost(operation, runtime)
        self._operations.dispatch(record, resumed(record, runtime, None, encode, also=also, reads=reads, cost=cost))
        return True

    async def _read_back(self, record: OperationRecord) -> tuple[bytes, Sample]:
        """A stored sample. Whatever is wrong is a `TinsmithError`: it must not keep the server from starting. `NotNow`:
        that may pass."""
        try:
            body = await self._bodies.get(record.body)
            operation = decode_operation(KIND, body)
            if not isinstance(operation, Sample):
                raise TypeError(f"{record.request_id} is logged as a sample, but holds a {type(operation).__name__}")
        except NotNow:
            raise
        except Exception as error:
            logger.exception("the stored sample %s cannot be read back", record.request_id)
            raise unreadable() from error
        return body, operation


def unknown_model(name: str) -> NotFound:
    """One answer for a name that means nothing here and for what belongs to somebody else."""
    return NotFound(
        f"model {name[:300]!r} does not exist here",
        field="model",
        hint="GET models lists the names that are accepted",
        code="model_not_found",
    )


def _cost(sample: Sample, runtime: Runtime) -> Cost:
    """What limits are charged for a sample."""
    length, most = len(sample.prompt), sample.params.max_tokens
    if most is None and runtime.info is not None:
        most = max(1, runtime.info.context_length - length)
    return Cost(longest=length + (most or 1), prompt=length, sequences=sample.num_samples, most=most)


def _within(sample: Sample, longest: int | None) -> Sample:
    """The sample, which draws up to the end of the context that a limit leaves it, if nothing else was asked for."""
    if longest is None or sample.params.max_tokens is not None:
        return sample
    return replace(sample, params=replace(sample.params, max_tokens=max(1, longest - len(sample.prompt))))


def _decode(
    request: SampleRequest, folder: str | None, limits: CodecLimits, longest: int | None
) -> tuple[ParsedSample, bytes, str]:
    """The operation, its stored form and what a repeat is recognised by: slow for a long prompt, so for a thread."""
    parsed = sample_operation(request, adapter_folder=folder, limits=limits)
    parsed = replace(parsed, operation=_within(parsed.operation, longest))
    return (
        parsed,
        encode_operation(KIND, parsed.operation, {"sparse_targets": parsed.sparse_targets}),
        request_digest(request),
    )


def sequence_ids(record: OperationRecord, num_samples: int) -> list[str]:
    """One id per sample of a request, the same for every repeat of it."""
    return [sequence_id_of(record.scope, record.seq_id, index) for index in range(num_samples)]
