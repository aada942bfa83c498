"""One adapter's whole training state as one safetensors file, for the time in which it is not in memory.

Vectors go from their memory into the file and back without another copy, and every byte is under a checksum. The files
serve the process that wrote them and no other; checkpoints are `engines/peft_format.py`. Not responsible for when.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.lora import AdapterWeights, Pairs, views
from engines.peft_format import SLOTS
from engines.torch_engine.adapter import AdapterState, Gradient
from schemas.operations import LoraSpec


class DamagedFile(Exception):
    """The file does not hold what was written into it."""


def write_state(path: Path, state: AdapterState) -> None:
    """Write weights, moments, steps and accumulated gradient (no open stage). Raises `OSError`.

    Not synced: after a crash of the machine nobody asks for it.
    """
    vectors = {"weights": state.flat, **state.moments}
    if state.gradient.flat is not None:
        vectors["gradient"] = state.gradient.flat
    buffers = {name: flat.detach().cpu().numpy().data.cast("B") for name, flat in vectors.items()}
    text = json.dumps(_description(state) | {"crc32": {name: zlib.crc32(data) for name, data in buffers.items()}})
    header: dict[str, Any] = {"__metadata__": {"state": text, "crc32": str(zlib.crc32(text.encode()))}}
    offset = 0
    for name, data in buffers.items():
        end = offset + data.nbytes
        header[name] = {"dtype": "F32", "shape": [data.nbytes // 4], "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    parts: list[bytes | memoryview] = [len(encoded).to_bytes(8, "little"), encoded, *buffers.values()]
    with path.open("wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]


def read_state(path: Path, device: torch.device) -> AdapterState:
    """The state as it was, bit for bit, on this device. Raises `DamagedFile` or `OSError`."""
    with path.open("rb") as file:
        size = path.stat().st_size
        description, start = _read_description(file, size)
        try:
            like, names = _layout(description)
            length = sum(tensor.numel() for pair in like.values() for tensor in pair)
            sums: dict[str, int] = description["crc32"]
            if list(sums) != names or start + 4 * length * len(names) != size:
                raise DamagedFile("another length than the header says")
            vectors = {name: _read_vector(file, length, sums[name]).to(device) for name in names}
            flat, moments = vectors["weights"], {slot: vectors[slot] for slot in SLOTS[description["optimizer"]]}
            poisoned = description["poisoned"]
            return AdapterState(
                spec=LoraSpec(**description["lora"]),
                flat=flat,
                weights=AdapterWeights(views(flat, like), description["scaling"]),
                optimizer_type=description["optimizer"],
                moments=moments,
                steps=description["steps"],
                gradient=Gradient(
                    vectors.get("gradient"), description["passes"], None if poisoned is None else tuple(poisoned)
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile("a header of another form") from error


def _description(state: AdapterState) -> dict[str, Any]:
    return {
        "lora": asdict(state.spec),
        "scaling": state.weights.scaling,
        "shapes": [[name, list(down.shape), list(up.shape)] for name, (down, up) in state.weights.pairs.items()],
        "optimizer": state.optimizer_type,
        "steps": state.steps,
        "gradient": state.gradient.flat is not None,
        "passes": state.gradient.passes,
        "poisoned": state.gradient.poisoned,
    }


def _read_description(file: BufferedIOBase, size: int) -> tuple[dict[str, Any], int]:
    """The checked description, and where the vectors begin."""
    length = int.from_bytes(file.read(8), "little")
    if length > size:
        raise DamagedFile("the header is cut off")
    try:
        metadata = json.loads(file.read(length))["__metadata__"]
        text = metadata["state"]
        if str(zlib.crc32(text.encode())) != metadata["crc32"]:
            raise DamagedFile("the header does not match its checksum")
        description: dict[str, Any] = json.loads(text)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile("the header is not readable") from error
    return description, 8 + length


def _layout(description: dict[str, Any]) -> tuple[Pairs, list[str]]:
    """The shapes of the pairs, without memory, and the names of the vectors in their order."""
    like = {
        name: (torch.empty(down, device="meta"), torch.empty(up, device="meta"))
        for name, down, up in description["shapes"]
    }
    names = ["weights", *SLOTS[description["optimizer"]]]
    return like, [*names, "gradient"] if description["gradient"] else names


def _read_vector(file: BufferedIOBase, length: int, checksum: int) -> Tensor:
    flat = torch.empty(length, dtype=torch.float32)
    buffer = flat.numpy().data.cast("B")
    if file.readinto(buffer) != buffer.nbytes or zlib.crc32(buffer) != checksum:
        raise DamagedFile("a vector does not match its checksum")
    return flat
