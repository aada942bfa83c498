"""The header of a safetensors file that a stranger wrote: read without trust, and without a library that computes.

Every byte of the file must be accounted for: the header bounded and strict JSON, each tensor's place inside the file
and as long as its shape and type say, the places next to each other without gaps and without overlap. Not responsible
for what is in the tensors, nor for which there must be (`peft_import.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import InvalidRequest

MAX_HEADER_BYTES = 8 << 20
"""Room for a hundred thousand tensors; an adapter has hundreds."""
MAX_DIMENSION = 1 << 31
MAX_DIMENSIONS = 8
WIDTHS: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of one number, by the format's names of types."""
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor: its type, its shape, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


def read_header(path: Path, *, field: str) -> dict[str, TensorPlace]:
    """Tensor name -> its place, in the order of the file.

    Raises `InvalidRequest` naming `field` (with the tensor's name behind it, where one is at fault) for every file that
    is not exactly what the format says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(_PICKLES):
            raise InvalidRequest(
                f"{field} is a pickle (or a zip archive of one), which is never read here; safetensors is accepted",
                field=field,
                hint="save the adapter with save_pretrained, which writes adapter_model.safetensors",
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length < 2 or length > size - 8:
            raise InvalidRequest(
                f"{field} is not a safetensors file: its {size} bytes have no header, or not all of it", field=field
            )
        if length > MAX_HEADER_BYTES:
            raise InvalidRequest(
                f"{field} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are accepted", field=field
            )
        header = _parsed(file.read(length), field)
    header.pop("__metadata__", None)
    places = {name: _place(name, entry, field, 8 + length, size) for name, entry in header.items()}
    _check_cover(places, field, 8 + length, size)
    return dict(sorted(places.items(), key=lambda item: item[1].start))


def _parsed(text: bytes, field: str) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field} is not a safetensors file: its header is not strict JSON", field=field) from None
    if not isinstance(header, dict):
        raise InvalidRequest(f"{field} is not a safetensors file: its header is no JSON object", field=field)
    return header


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _place(name: str, entry: Any, field: str, data: int, size: int) -> TensorPlace:
    where = f"{field}.{name[:200]}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidRequest(f"{where} must have exactly dtype, shape and data_offsets", field=where)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise InvalidRequest(f"{where} has dtype {str(dtype)[:40]!r}; {', '.join(WIDTHS)} are known", field=where)
    if not _whole_numbers(shape, MAX_DIMENSION) or len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{where} has shape {str(shape)[:80]}; a list of whole sizes is accepted", field=where)
    if not _whole_numbers(offsets, size) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidRequest(
            f"{where} has data_offsets {str(offsets)[:80]}; two numbers in order, 0 to {size - data}, are accepted",
            field=where,
        )
    place = TensorPlace(dtype, tuple(shape), data + offsets[0])
    if place.size != offsets[1] - offsets[0] or data + offsets[1] > size:
        raise InvalidRequest(
            f"{where} takes {place.size} bytes by its shape and dtype, but its data_offsets are {offsets[0]} to "
            f"{offsets[1]} of {size - data}",
            field=where,
        )
    return place


def _whole_numbers(value: Any, most: int) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= most for each in value)


def _check_cover(places: Mapping[str, TensorPlace], field: str, data: int, size: int) -> None:
    """Raise unless the tensors lie next to each other from the end of the header to the end of the file."""
    end = data
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].size)):
        if place.start != end:
            problem = "overlaps another tensor" if place.start < end else "leaves a gap before it"
            raise InvalidRequest(f"{field}.{name[:200]} {problem}", field=f"{field}.{name[:200]}")
        end = place.start + place.size
    if end != size:
        raise InvalidRequest(f"{field} has {size - end} bytes behind its last tensor", field=field)
