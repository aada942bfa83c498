"""How much one request may hold. Everything that a body can make the server allocate is bounded here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CodecLimits:
    """Bounds of one body; what is over them is refused by name, never cut."""

    max_body_bytes: int = 64 * 1024 * 1024
    """Of the body on the wire, and again of the decompressed body."""
    max_datums: int = 8 * 1024
    max_datum_tokens: int = 1024 * 1024
    """Of one datum, or of one prompt."""
    max_tensor_cells: int = 32 * 1024 * 1024
    """Numbers in all dense tensors of one request together: a sparse tensor can claim far more than it carries."""
    body_timeout_seconds: float = 120.0
    """From the first to the last byte of a body."""
    max_window_bytes: int = 32 * 1024 * 1024
    """Memory that a zstd frame may ask for to be decompressed."""
