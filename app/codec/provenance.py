"""Provenance spans of a datum: which of its targets are tokens of which sampled sequence.

Checked for form only: two lists that tile the model input and the targets. Not responsible for what is known of a
sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.errors import InvalidRequest

MAX_SPANS = 4096
"""Spans of one list; a datum has a few for each turn."""


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """`length` tokens from token `offset` of the prompt or of the sampled tokens of a sequence."""

    kind: Literal["prompt_tokens", "sampled_tokens"]
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SampledRun:
    """Targets `start` to `start + length` of a datum are the sampled tokens of a sequence from `offset` on."""

    start: int
    sequence_id: str
    offset: int
    length: int


def sampled_runs(
    model_input: Sequence[ProvenanceSpan], targets: Sequence[ProvenanceSpan], length: int, where: str
) -> tuple[SampledRun, ...]:
    """The sampled parts of a datum's targets, in order; none if it has no spans.

    Raises InvalidRequest unless both lists are there or none, and each covers all `length` positions.
    """
    if not model_input and not targets:
        return ()
    _check_tiling(model_input, length, f"{where}.model_input_spans")
    _check_tiling(targets, length, f"{where}.loss_fn_input_spans")
    return tuple(_runs(targets))


def _runs(spans: Iterable[ProvenanceSpan]) -> Iterable[SampledRun]:
    start = 0
    for span in spans:
        if span.kind == "sampled_tokens" and span.length:
            yield SampledRun(start, span.sequence_id, span.offset, span.length)
        start += span.length


def _check_tiling(spans: Sequence[ProvenanceSpan], length: int, field: str) -> None:
    if len(spans) > MAX_SPANS:
        raise InvalidRequest(f"{field} has {len(spans)} spans; at most {MAX_SPANS} are accepted", field=field)
    for i, span in enumerate(spans):
        if not span.sequence_id or span.offset < 0 or span.length < 0:
            raise InvalidRequest(
                f"{field}[{i}] must name a sequence_id, an offset of at least 0 and a length of at least 0",
                field=f"{field}[{i}]",
            )
    total = sum(span.length for span in spans)
    if total != length:
        raise InvalidRequest(
            f"{field} covers {total} positions; it must cover all {length} of the example", field=field
        )
