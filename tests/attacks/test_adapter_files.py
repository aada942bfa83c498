"""Folders of adapters that were altered or made up, with checksums that are right: refused by what is in them.

Nobody uploads a folder; whoever can write into the server's storage may still not make it run code, read another file
or compute with numbers that no adapter has.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.lora import AdapterWeights
from engines.peft_format import read_adapter, write_adapter
from schemas.errors import InvalidRequest
from schemas.operations import LoraSpec

WEIGHTS, CONFIG, MANIFEST = "adapter_model.safetensors", "adapter_config.json", "tinsmith.json"
RAN = "tinsmith-test-code-ran"


class Payload:
    """Unpickled, it leaves a mark."""

    def __reduce__(self) -> Any:
        return eval, (f"__import__('os').environ.update({{{RAN!r}: 'yes'}})",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound adapter of one module."""
    pairs = {"model.layers.0.self_attn.q_proj": (torch.ones(4, 8), torch.ones(8, 4))}
    made = tmp_path / "secret" / "adapter"
    made.parent.mkdir()
    write_adapter(
        made, spec=LoraSpec(4, 1), weights=AdapterWeights(pairs, 8.0), base_model="tiny", all_linears=list(pairs)
    )
    read_adapter(made)
    return made


def _header(entries: dict[str, Any], data: bytes = b"", *, claimed: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def _tensor(start: int, end: int, shape: Any = (4, 8), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN, UP = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
FULL = bytes(256)

FILES: dict[str, bytes | Callable[[], bytes]] = {
    "nothing": b"",
    "a header of 9 exabytes": _header({}, claimed=2**63),
    "a header of 120 MB": lambda: struct.pack("<Q", 120_000_000) + b'{"' + b"a" * 120_000_000,
    "a header beyond the file": _header({}, claimed=1000),
    "a header that is no JSON": struct.pack("<Q", 4) + b"{{{{" + FULL,
    "a header of a thousand levels": struct.pack("<Q", 2000) + b"[" * 1000 + b"]" * 1000,
    "negative offsets": _header({DOWN: _tensor(-128, 0), UP: _tensor(0, 128, (8, 4))}, FULL),
    "offsets that overlap": _header({DOWN: _tensor(0, 128), UP: _tensor(64, 192, (8, 4))}, FULL),
    "offsets that run backwards": _header({DOWN: _tensor(128, 0), UP: _tensor(128, 256, (8, 4))}, FULL),
    "offsets beyond the file": _header({DOWN: _tensor(0, 128), UP: _tensor(128, 2**62, (8, 4))}, FULL),
    "offsets with a hole": _header({DOWN: _tensor(0, 128), UP: _tensor(192, 320, (8, 4))}, bytes(320)),
    "a shape that overflows": _header({DOWN: _tensor(0, 128, (2**62, 8)), UP: _tensor(128, 256, (8, 4))}, FULL),
    "a shape of another size": _header({DOWN: _tensor(0, 128, (4, 9)), UP: _tensor(128, 256, (8, 4))}, FULL),
    "an unknown dtype": _header({DOWN: _tensor(0, 128, dtype="X99"), UP: _tensor(128, 256, (8, 4))}, FULL),
    "a pickle": lambda: pickle.dumps(Payload()),
    "what torch saves": lambda: _saved(),
}


def _saved() -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": Payload()}, buffer)
    return buffer.getvalue()


def _signed(folder: Path) -> None:
    """Let the manifest have the checksums of what is there."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in manifest["sha256"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _refused(folder: Path, tmp_path: Path) -> InvalidRequest:
    began = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        read_adapter(folder)
    assert time.monotonic() - began < 20
    text = f"{caught.value.message} {caught.value.hint}"
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert RAN not in os.environ, "code of the file was run"
    return caught.value


@pytest.mark.parametrize("what", FILES)
def test_files_that_are_no_weights(folder: Path, tmp_path: Path, what: str) -> None:
    content = FILES[what]
    (folder / WEIGHTS).write_bytes(content() if callable(content) else content)
    _signed(folder)
    tracemalloc.start()
    try:
        _refused(folder, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def _altered(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return alter


def _configured(**values: Any) -> Callable[[Path], None]:
    def configure(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, **values}))

    return configure


CHANGES: dict[str, Callable[[Path], None]] = {
    "a tensor too many": _altered(lambda tensors: tensors.update(extra=torch.ones(2))),
    "a tensor too few": _altered(lambda tensors: tensors.pop(UP)),
    "another rank": _altered(lambda tensors: tensors.update({DOWN: torch.ones(8, 8), UP: torch.ones(8, 8)})),
    "a vector for a matrix": _altered(lambda tensors: tensors.update({DOWN: torch.ones(32)})),
    "a number that is none": _altered(lambda tensors: tensors[DOWN].__setitem__((0, 0), float("nan"))),
    "an infinite number": _altered(lambda tensors: tensors[UP].__setitem__((0, 0), float("inf"))),
    "integers": _altered(lambda tensors: tensors.update({DOWN: torch.ones(4, 8, dtype=torch.int64)})),
    "complex numbers": _altered(lambda tensors: tensors.update({DOWN: torch.ones(4, 8, dtype=torch.complex64)})),
    "a configuration of another rank": _configured(r=8),
    "a configuration of another scale": _configured(lora_alpha=10**9),
    "a configuration that is a list": lambda folder: (folder / CONFIG).write_text("[]") and None,
}


@pytest.mark.parametrize("what", CHANGES)
def test_weights_that_are_none_of_an_adapter(folder: Path, tmp_path: Path, what: str) -> None:
    CHANGES[what](folder)
    _signed(folder)
    _refused(folder, tmp_path)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, MANIFEST])
def test_links_are_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    _refused(folder, tmp_path)


def test_pipes_and_folders_are_not_read(folder: Path, tmp_path: Path) -> None:
    for replace in (os.mkfifo, os.mkdir):
        (folder / WEIGHTS).unlink()
        replace(folder / WEIGHTS)
        _refused(folder, tmp_path)


def test_pickled_weights_beside_or_instead_are_not_read(folder: Path, tmp_path: Path) -> None:
    for name in ("adapter_model.bin", "pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(_saved())
    read_adapter(folder)
    assert RAN not in os.environ
    (folder / WEIGHTS).unlink()
    _refused(folder, tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        [],
        {"format_version": 999},
        {"format_version": 1, "lora": {"rank": 2**40}},
        {"format_version": 1, "lora": {"rank": True}},
        {"format_version": 1, "lora": None, "sha256": {"../../etc/passwd": "0"}},
    ],
)
def test_a_manifest_that_is_none(folder: Path, tmp_path: Path, manifest: Any) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest))
    _refused(folder, tmp_path)
