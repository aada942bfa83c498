"""How likely sampled sequences were when they were sampled, remembered for losses that compare with it.

Recorded for samples made with `record_stability_info`, in the transaction that finishes them, and kept for a while.
Responsible for who may read what, and for spans of a sequence. Not responsible for any loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.ext.asyncio import AsyncSession

from app.services.paths import sequence_id_of
from app.services.submission import Rows
from schemas.errors import EngineFailure, InvalidRequest, NotFound
from schemas.operations import Float32, OperationResult, Sample, SampleResult
from store.database import Store
from store.records import OperationRecord, SequenceRecord
from store.sequences import add_sequences, expire_sequences, get_sequences


@dataclass(frozen=True, slots=True)
class Span:
    """Where in a sampled sequence: `length` tokens from token `offset` of its drawn tokens (the prompt not counted)."""

    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """What is known of n tokens of a sampled sequence.

    `tokens` int32 [n]; `logprobs` float32 [n] as the client got them; `plain_logprobs` float32 [n] of the weights that
    sampled, log softmax(logits) at temperature 1. `checkpoint_id` names those weights, None = the base model.
    """

    sequence_id: str
    tokens: NDArray[np.int32]
    logprobs: Float32
    plain_logprobs: Float32
    temperature: float
    base_model: str
    checkpoint_id: str | None


class OutsideSequence(InvalidRequest):
    """A span that is not inside its sequence."""

    def __init__(self, span: Span, message: str) -> None:
        super().__init__(message, field="offset")
        self.span = span


class Stability:
    """Statistics of sampled sequences, by project.

    Args:
        retention: seconds that a sequence is remembered.
        clock: the time, aware UTC.
    """

    def __init__(self, store: Store, retention: float, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._retention = timedelta(seconds=retention)
        self._clock = clock

    async def stability(self, project_id: str, sequence_id: str, offset: int, length: int) -> SampledSpan:
        """`length` tokens from `offset` of a sequence that this project sampled. Raises as `spans`."""
        return (await self.spans(project_id, [Span(sequence_id, offset, length)]))[0]

    async def spans(self, project_id: str, spans: Sequence[Span]) -> list[SampledSpan]:
        """The same for many spans at once, in their order.

        Raises:
            NotFound: this project has no such sequence: it was sampled without `record_stability_info`, was never
                finished, is older than the retention, or is another project's.
            InvalidRequest: a span is not inside its sequence.
        """
        wanted = {span.sequence_id for span in spans}
        oldest = self._clock() - self._retention
        found = await self._store.read(lambda db: get_sequences(db, project_id, wanted))
        for sequence_id in wanted:
            record = found.get(sequence_id)
            if record is None or record.created_at < oldest:
                raise NotFound(
                    f"nothing is remembered of a sampled sequence {sequence_id[:200]!r}",
                    field="sequence_id",
                    hint="sample with record_stability_info=true, and train on the result before it is forgotten",
                    code="unknown_sequence",
                )
        return [_cut(found[span.sequence_id], span) for span in spans]

    def recorder(self, base_model: str, sample: Sample) -> Callable[[OperationRecord, OperationResult], Rows] | None:
        """What remembers the sequences of a sample when it is finished; None if the sample is not to be remembered."""
        if not sample.plain_logprobs:
            return None
        temperature = sample.params.temperature  # and not the sample: this is kept while it waits
        return lambda record, outcome: self._rows(record, base_model, temperature, outcome)

    async def sweep(self) -> None:
        """Forget what is older than the retention."""
        before = self._clock() - self._retention
        await self._store.write(lambda db: expire_sequences(db, before))

    def _rows(self, record: OperationRecord, base_model: str, temperature: float, outcome: OperationResult) -> Rows:
        if not isinstance(outcome, SampleResult):
            raise EngineFailure("the worker did not report what it sampled")
        now = self._clock()
        sequences: list[SequenceRecord] = []
        for index, sequence in enumerate(outcome.sequences):
            if sequence.plain_logprobs is None:
                raise EngineFailure("the worker did not report the plain logprobs of what it sampled")
            sequences.append(
                SequenceRecord(
                    sequence_id=sequence_id_of(record.scope, record.seq_id, index),
                    project_id=record.project_id,
                    base_model=base_model,
                    checkpoint_id=record.checkpoint_id,
                    temperature=temperature,
                    tokens=sequence.tokens.astype("<i4").tobytes(),
                    logprobs=sequence.logprobs.astype("<f4").tobytes(),
                    plain_logprobs=sequence.plain_logprobs.astype("<f4").tobytes(),
                    created_at=now,
                )
            )

        async def rows(db: AsyncSession) -> None:
            await add_sequences(db, sequences)

        return rows


def _cut(record: SequenceRecord, span: Span) -> SampledSpan:
    tokens = np.frombuffer(record.tokens, "<i4")
    if span.offset < 0 or span.length < 0 or span.offset + span.length > tokens.size:
        raise OutsideSequence(
            span,
            f"offset {span.offset} and length {span.length} are not inside sequence {span.sequence_id[:200]!r}, which "
            f"has {tokens.size} sampled tokens",
        )
    part = slice(span.offset, span.offset + span.length)
    return SampledSpan(
        sequence_id=record.sequence_id,
        tokens=tokens[part].astype(np.int32),
        logprobs=np.frombuffer(record.logprobs, "<f4")[part].astype(np.float32),
        plain_logprobs=np.frombuffer(record.plain_logprobs, "<f4")[part].astype(np.float32),
        temperature=record.temperature,
        base_model=record.base_model,
        checkpoint_id=record.checkpoint_id,
    )
