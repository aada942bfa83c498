"""Which rank computes which datum of a batch.

The answer depends on the batch alone, never on its company: a batch that runs again, or beside others, gives the same
bits. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def share(lengths: Sequence[int], ranks: int, *, window: int, first: int = 0) -> tuple[int, ...]:
    """The rank of each datum, by its place in the batch.

    Datums are taken in windows, the longest of a window first, each to the rank that has the least so far: a range of
    the batch is then about as balanced as all of it.

    Args:
        lengths: tokens of each datum, in the order of the batch.
        ranks: how many there are; of copies of the model, where several ranks share one.
        window: tokens of a window (that of a turn, so that a turn is balanced); at least one datum.
        first: which rank gets the first datum, so that many small batches do not all go to the same one.
    """
    loads = [0] * ranks
    chosen = [0] * len(lengths)
    for part in _windows(lengths, window):
        for index in sorted(part, key=lambda index: (-lengths[index], index)):
            rank = min(range(ranks), key=lambda rank: (loads[rank], (rank - first) % ranks))
            loads[rank] += lengths[index]
            chosen[index] = rank
    return tuple(chosen)


def _windows(lengths: Sequence[int], window: int) -> Iterator[range]:
    """Neighbouring datums of at most `window` tokens together."""
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > window:
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        yield range(start, len(lengths))
