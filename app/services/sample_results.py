"""What turns the result of a sample into bytes. It is kept while the sample waits, so it holds little of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from app.codec import encode_result
from app.services.submission import Finished
from app.services.usage import sample_tokens
from schemas.operations import Int64, OperationResult, Sample

KIND = "sample"


def sample_encoder(sample: Sample, sparse_targets: bool) -> Callable[[OperationResult], Finished]:
    """What encodes the result of `sample`; slow for a long one, so for a thread.

    Args:
        sparse_targets: `target_prompt_logprobs` came in CSR form, and goes back in it.
    """
    layout = (
        None if not sparse_targets or sample.target_prompt_logprobs is None else _Layout(sample.target_prompt_logprobs)
    )
    length = len(sample.prompt)

    def finish(outcome: OperationResult) -> Finished:
        targets = None if layout is None else layout.targets()
        data, content_type = encode_result(KIND, outcome, sparse_targets=targets)
        return Finished(data, content_type, tokens=sample_tokens(length, outcome))

    return finish


class _Layout:
    """Which cells of int64 [L-1, K] were asked for (those that are not -1), in a bit for each."""

    def __init__(self, targets: Int64) -> None:
        self._shape = targets.shape
        self._bits = np.packbits(targets >= 0)

    def targets(self) -> Int64:
        """0 where a cell was asked for, else -1."""
        count = int(np.prod(self._shape))
        return np.unpackbits(self._bits, count=count).reshape(self._shape).astype(np.int64) - 1
