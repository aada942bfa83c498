"""Keys and values of sequences in progress, on one model that attends through the interface of `sampling_pass.py`.

A holder belongs to one request: first one row (its prompt), then a row per sample. Not responsible for budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROWTH = 64
"""Positions by which a buffer grows at least, and the grid of prefixes."""


class Holder:
    """Per layer keys and values, [2, rows, kv_heads, capacity, width]; the first `length` positions are filled."""

    def __init__(self) -> None:
        self.length = 0
        self.rows = 1
        self._layers: dict[int, Tensor] = {}
        self._file: Path | None = None

    @property
    def capacity(self) -> int:
        """Positions per row that have memory."""
        return next(iter(self._layers.values())).shape[3] if self._layers else 0

    @property
    def tokens(self) -> int:
        """What it takes of a budget: rows times capacity."""
        return self.rows * self.capacity

    @property
    def aside(self) -> bool:
        """Whether its content is in a file."""
        return self._file is not None

    def needed(self, new: int) -> int:
        """The tokens that it would take with `new` more positions per row."""
        return self.rows * max(self.capacity, _grown(self.length + new))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put [rows, kv_heads, n, width] behind the first `length` positions; returns all keys and values, as views.

        `length` moves only with `advance`, when all layers have been through: a pass that failed can be run again.
        """
        stop = self.length + keys.shape[2]
        buffer = self._layers.get(layer)
        if buffer is None or buffer.shape[3] < stop:
            grown = keys.new_empty(2, self.rows, keys.shape[1], max(self.capacity, _grown(stop)), keys.shape[3])
            if buffer is not None:
                grown[:, :, :, : self.length] = buffer[:, :, :, : self.length]
            buffer = self._layers[layer] = grown
        buffer[0, :, :, self.length : stop] = keys
        buffer[1, :, :, self.length : stop] = values
        return buffer[0, :, :, :stop], buffer[1, :, :, :stop]

    def append(self, layer: int, both: Tensor) -> tuple[Tensor, Tensor]:
        """`write` for one more position per row: keys and values [2, rows, kv_heads, width] in one copy."""
        buffer = self._layers.get(layer)
        if buffer is None or buffer.shape[3] <= self.length:
            return self.write(layer, both[0].unsqueeze(2), both[1].unsqueeze(2))
        buffer[:, :, :, self.length] = both
        filled = buffer[:, :, :, : self.length + 1]
        return filled[0], filled[1]

    def advance(self, new: int) -> None:
        """`new` positions per row are complete."""
        self.length += new

    def select(self, rows: Sequence[int]) -> None:
        """Make `rows` (repeats allowed) the content."""
        index = torch.tensor(list(rows))
        for layer, buffer in self._layers.items():
            self._layers[layer] = buffer.index_select(1, index.to(buffer.device))
        self.rows = len(rows)

    # -- prefixes ------------------------------------------------------------------------------------------------
    def block(self, start: int) -> dict[int, Tensor]:
        """A copy of `GROWTH` positions of the first row, per layer [2, kv_heads, GROWTH, width]."""
        return {layer: buffer[:, 0, :, start : start + GROWTH].clone() for layer, buffer in self._layers.items()}

    def append_block(self, block: dict[int, Tensor]) -> None:
        """Put a block behind the content of a holder of one row."""
        for layer, part in block.items():
            self.write(layer, part[0].unsqueeze(0), part[1].unsqueeze(0))
        self.advance(GROWTH)

    # -- out of memory and back ----------------------------------------------------------------------------------
    def put_aside(self, path: Path) -> None:
        """Write the content to a file and free its memory. What fails leaves no file behind."""
        content = {str(layer): buffer[:, :, :, : self.length].contiguous() for layer, buffer in self._layers.items()}
        try:
            save_file(content, path)
        except Exception:
            path.unlink(missing_ok=True)
            raise
        self._device = next(iter(self._layers.values())).device
        self._layers, self._file = {}, path

    def bring_back(self) -> None:
        """Read the content back, bit for bit, and delete the file."""
        assert self._file is not None
        for layer, content in load_file(self._file).items():
            shape = (*content.shape[:3], _grown(self.length), content.shape[4])
            buffer = torch.empty(shape, dtype=content.dtype, device=self._device)
            buffer[:, :, :, : self.length] = content.to(self._device)
            self._layers[int(layer)] = buffer
        self.free()

    def free(self) -> None:
        """Delete the file, if there is one."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


def _grown(positions: int) -> int:
    return -(-positions // GROWTH) * GROWTH
