"""What was recorded when sequences were sampled, put into the batches that train on them.

So `stable_reinforce` compares with the sampling distribution itself and not with what a client says of it. Not
responsible for recording (`stability.py`) or for the loss (engines).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from app.codec.provenance import SampledRun
from app.services.stability import OutsideSequence, SampledSpan, Span, Stability
from schemas.errors import InvalidRequest, NotFound
from schemas.operations import Datum, TrainBatch

Runs = Sequence[Sequence[SampledRun]]


async def with_recorded(stability: Stability, project_id: str, batch: TrainBatch, runs: Runs) -> TrainBatch:
    """The batch with the recorded plain logprobs in place of the `logprobs` that the client gave.

    Where nothing is remembered of a sequence (for this project), the client's stay.

    Args:
        runs: the sampled parts of each datum's targets.

    Raises:
        InvalidRequest: a span is not inside its sequence, or the targets are not the tokens that were sampled.
    """
    wanted = {_span(run) for datum in runs for run in datum}
    try:
        found = await _remembered(stability, project_id, sorted(wanted, key=lambda span: span.sequence_id))
    except OutsideSequence as error:
        index = next(i for i, datum in enumerate(runs) if any(_span(run) == error.span for run in datum))
        field = f"data[{index}].loss_fn_input_spans"
        raise InvalidRequest(f"{field}: {error.message}", field=field) from None
    datums = tuple(
        _filled(datum, mine, found, i) for i, (datum, mine) in enumerate(zip(batch.datums, runs, strict=True))
    )
    return replace(batch, datums=datums)


def _span(run: SampledRun) -> Span:
    return Span(run.sequence_id, run.offset, run.length)


async def _remembered(stability: Stability, project_id: str, wanted: Sequence[Span]) -> dict[Span, SampledSpan]:
    """Those of the spans whose sequences are known. All at once if all are."""
    try:
        return dict(zip(wanted, await stability.spans(project_id, wanted), strict=True))
    except NotFound:
        pass  # at least one is not known: ask by sequence
    found: dict[Span, SampledSpan] = {}
    for sequence_id in {span.sequence_id for span in wanted}:
        mine = [span for span in wanted if span.sequence_id == sequence_id]
        try:
            found.update(zip(mine, await stability.spans(project_id, mine), strict=True))
        except NotFound:
            continue
    return found


def _filled(datum: Datum, runs: Sequence[SampledRun], found: Mapping[Span, SampledSpan], index: int) -> Datum:
    logprobs = datum.inputs["logprobs"].astype(np.float32)
    for run in runs:
        known = found.get(_span(run))
        if known is None:
            continue
        part = slice(run.start, run.start + run.length)
        if not np.array_equal(datum.inputs["target_tokens"][part], known.tokens):
            raise InvalidRequest(
                f"data[{index}].loss_fn_input_spans: targets {run.start} to {run.start + run.length - 1} are not the "
                f"tokens that were sampled as {run.sequence_id[:200]!r}",
                field=f"data[{index}].loss_fn_input_spans",
            )
        logprobs[part] = known.plain_logprobs
    return replace(datum, inputs={**datum.inputs, "logprobs": logprobs})
