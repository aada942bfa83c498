"""Line charts of characters: eight dots to a cell, so that a curve fits into a few lines of a terminal.

Pure; not responsible for colours or for where a chart stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The dots of a Braille cell: left and right column, from top to bottom."""


def number(value: float | None) -> str:
    """A measured number in at most nine characters."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.4g}" if size == 0 or 1e-3 <= size < 1e5 else f"{value:.2e}"


def chart(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """`height` lines of at most `width` characters: the values from left to right, their range at the left.

    None and what is not finite leaves a gap. More values than dots are averaged.
    """
    label = 9
    columns = 2 * max(1, width - label - 1)
    points = _squeezed(values, columns)
    known = [value for value in points if value is not None]
    if not known:
        return ["(nothing measured yet)".ljust(width)[:width], *[""] * (height - 1)]
    low, high = min(known), max(known)
    cells = [[0] * (columns // 2) for _ in range(height)]
    rows = 4 * height
    last: int | None = None
    for column, value in enumerate(points):
        if value is None:
            last = None
            continue
        row = rows // 2 if high == low else round((high - value) / (high - low) * (rows - 1))
        # The dots between two neighbours are drawn too, so that a steep curve stays one line.
        for each in range(min(row, last if last is not None else row), max(row, last if last is not None else row) + 1):
            cells[each // 4][column // 2] |= _DOTS[column % 2][each % 4]
        last = row
    labels = {0: number(high), height - 1: number(low)} if height > 1 else {0: number(high)}
    return [
        f"{labels.get(line, ''):>{label}} " + "".join(chr(_BLANK + dots) for dots in cell).rstrip(chr(_BLANK))
        for line, cell in enumerate(cells)
    ]


def _squeezed(values: Sequence[float | None], columns: int) -> list[float | None]:
    found = [value if value is not None and math.isfinite(value) else None for value in values]
    if len(found) <= columns:
        return found
    squeezed: list[float | None] = []
    for column in range(columns):
        part = found[column * len(found) // columns : (column + 1) * len(found) // columns]
        known = [value for value in part if value is not None]
        squeezed.append(math.fsum(known) / len(known) if known else None)
    return squeezed
