"""Foreign PEFT adapters: checked against a base model, and written as a checkpoint folder of this server.

The numbers stay those of the adapter: 16-bit floats are widened to float32, and where its `lora_alpha` is not ours, B
is scaled so that `B @ A` contributes the same (exactly, if the ratio is a power of two). Works on numpy and in bounded
memory; whoever reads the folder (`peft_format.py`) cannot tell it from one that a worker wrote. Not responsible for the
form of a safetensors file (`safetensors_header.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engines.checkpoint_files import CONFIG_FILE, FORMAT_VERSION, MANIFEST_FILE, WEIGHTS_FILE, sha256_of
from engines.peft_config import AdapterConfig, written_config
from engines.safetensors_header import TensorPlace, read_header
from schemas.base_model_info import Linear
from schemas.errors import InvalidRequest
from schemas.operations import LORA_ALPHA, Float32, LoraSpec

FIELD = "adapter_model"
_PREFIX = "base_model.model."
_SIDES = ("lora_A", "lora_B")
_CHUNK = 4 << 20
"""Numbers that are looked at together: 16 MiB of float32."""
_WIDENED: Mapping[str, Any] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class ForeignAdapter:
    """An adapter file whose tensors fit the base model; their values have not been looked at."""

    path: Path
    config: AdapterConfig
    spec: LoraSpec
    linears: Sequence[Linear]
    places: Mapping[str, TensorPlace]

    @property
    def size(self) -> int:
        """Bytes of the tensors as they will be stored."""
        return sum(4 * math.prod(place.shape) for place in self.places.values())


def open_adapter(path: Path, config: AdapterConfig, linears: Sequence[Linear]) -> ForeignAdapter:
    """Look at the header of an adapter file.

    Args:
        linears: every linear of the base model that adapters can cover.

    Raises `InvalidRequest` naming the tensor: not of this format, missing, extra, another rank, shape or dtype.
    """
    places = read_header(path, field=FIELD)
    by_key = {_key(linear.name, side): (linear, side) for linear in linears for side in _SIDES}
    for key in places:
        if key not in by_key:
            raise _unknown(key)
    families = {by_key[key][0].family for key in places}
    covered = [linear for linear in linears if linear.family in families]
    if not covered:
        raise InvalidRequest(f"{FIELD} holds no tensors", field=FIELD)
    for linear in covered:
        for side in _SIDES:
            _check_tensor(linear, side, places.get(_key(linear.name, side)), config.rank)
    config.check_targets([linear.name for linear in covered])
    spec = LoraSpec(config.rank, 0, "attn" in families, "mlp" in families, "unembed" in families)
    return ForeignAdapter(path, config, spec, covered, places)


def write_folder(adapter: ForeignAdapter, folder: Path, base_model: str) -> int:
    """Write the checkpoint's files into an existing empty folder, durably; returns their size in bytes.

    Raises `InvalidRequest` for a value that is not finite, `OSError` from the disk.
    """
    config = written_config(base_model, adapter.spec.rank, sorted(linear.name for linear in adapter.linears))
    _write(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
    with (folder / WEIGHTS_FILE).open("xb") as out:
        _write_tensors(adapter, out)
        _sync(out)
    manifest = {
        "format_version": FORMAT_VERSION,
        "lora": asdict(adapter.spec),
        "optimizer": None,
        "sha256": {name: sha256_of(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)},
    }
    _write(folder / MANIFEST_FILE, json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n")
    return sum(file.stat().st_size for file in folder.iterdir())


def _key(module: str, side: str) -> str:
    return f"{_PREFIX}{module}.{side}.weight"


def _unknown(key: str) -> InvalidRequest:
    return InvalidRequest(
        f"{FIELD} has a tensor {key[:200]!r}, which is no part of an adapter for this base model",
        field=f"{FIELD}.{key[:200]}",
        hint="lora_A and lora_B of linear layers of attention, MLP and output head are accepted, under PEFT's names",
    )


def _check_tensor(linear: Linear, side: str, place: TensorPlace | None, rank: int) -> None:
    key = _key(linear.name, side)
    shape = (rank, linear.in_features) if side == "lora_A" else (linear.out_features, rank)
    if place is None:
        raise InvalidRequest(
            f"{FIELD} lacks the tensor {key!r}; an adapter covers all linear layers of a family ({linear.family}) or "
            "none",
            field=f"{FIELD}.{key}",
        )
    if place.shape != shape:
        raise InvalidRequest(
            f"{FIELD}.{key} has shape {list(place.shape)}; {list(shape)} is expected at rank {rank}",
            field=f"{FIELD}.{key}",
        )
    if place.dtype not in _WIDENED:
        raise InvalidRequest(
            f"{FIELD}.{key} has dtype {place.dtype}; {', '.join(_WIDENED)} are accepted", field=f"{FIELD}.{key}"
        )


def _write_tensors(adapter: ForeignAdapter, out: BinaryIO) -> None:
    """The whole safetensors file: header, then every tensor as float32, A before B, in the order of the model."""
    keys = [_key(linear.name, side) for linear in adapter.linears for side in _SIDES]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in keys:
        begin, end = end, end + 4 * math.prod(adapter.places[key].shape)
        header[key] = {"dtype": "F32", "shape": list(adapter.places[key].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors on a border of 8 bytes, as the format asks
    out.write(len(text).to_bytes(8, "little") + text)
    for key in keys:
        factor = np.float32(adapter.config.alpha / LORA_ALPHA) if ".lora_B." in key else np.float32(1)
        for values in _values(adapter.path, key, adapter.places[key]):
            scaled = values * factor if factor != 1 else values
            if not np.isfinite(scaled).all():
                raise InvalidRequest(f"{FIELD}.{key} has values that are not finite", field=f"{FIELD}.{key}")
            out.write(scaled.astype("<f4", copy=False).tobytes())


def _values(path: Path, key: str, place: TensorPlace) -> Iterator[Float32]:
    """The numbers of a tensor, flat, in chunks. Raises `InvalidRequest` if the file has become shorter."""
    count, done = math.prod(place.shape), 0
    with path.open("rb") as file:
        file.seek(place.start)
        while done < count:
            raw = np.fromfile(file, dtype=_WIDENED[place.dtype], count=min(_CHUNK, count - done))
            if raw.size == 0:
                raise InvalidRequest(f"{FIELD}.{key} is cut off", field=f"{FIELD}.{key}")
            done += raw.size
            if place.dtype == "BF16":  # the upper half of a float32
                yield (raw.astype(np.uint32) << 16).view(np.float32)
            else:
                yield raw.astype(np.float32, copy=False)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
