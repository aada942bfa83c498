"""Real text of natural, uneven lengths: Python's own reference pages, which every CPython installation has."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.training.work import Example


class Texts:
    """Sequences of tokens, tokenized once; every draw of the same seed is the same."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        pages = [topics[name] for name in sorted(topics)]
        self._pages = [np.array(page.ids, dtype=np.int64) for page in tokenizer.encode_batch(pages)]
        paragraphs = [paragraph for page in pages for paragraph in page.split("\n\n")]
        self._paragraphs = [np.array(text.ids, dtype=np.int64) for text in tokenizer.encode_batch(paragraphs)]

    def equal(self, count: int, length: int, seed: int = 0) -> tuple[Example, ...]:
        """`count` pieces of `length` tokens each, from places drawn at random."""
        draw = random.Random(seed)
        long = [page for page in self._pages if len(page) > length]
        examples = []
        for page in draw.choices(long, k=count):
            start = draw.randrange(len(page) - length)
            examples.append(_example(page[start : start + length + 1]))
        return tuple(examples)

    def ragged(self, count: int, shortest: int, longest: int, seed: int = 0) -> tuple[Example, ...]:
        """`count` whole paragraphs or pages; their lengths run evenly over the logarithm of `shortest` to `longest`.

        A wanted length is met by the text nearest to it, so that both ends are there; one text may be cut to `longest`.
        """
        draw = random.Random(seed)
        texts = [text for text in [*self._paragraphs, *self._pages] if len(text) > shortest]
        wanted = [round(shortest * (longest / shortest) ** (i / max(1, count - 1))) for i in range(count)]
        chosen = []
        for length in wanted:
            nearest = sorted(texts, key=lambda text: abs(len(text) - 1 - length))[:4]
            chosen.append(_example(draw.choice(nearest)[: longest + 1]))
        draw.shuffle(chosen)
        return tuple(chosen)


def _example(ids: NDArray[np.int64]) -> Example:
    return Example(np.ascontiguousarray(ids[:-1]), np.ascontiguousarray(ids[1:]))
