"""Adapter folders: PEFT's own format plus the optimizer state, written whole or not at all, verified when read.

A folder holds `adapter_config.json` and `adapter_model.safetensors` (so that `PeftModel.from_pretrained` loads it as it
is), `optimizer.safetensors` for training checkpoints, and `tinsmith.json` (format version, geometry, checksums). Only
safetensors and JSON, never pickle. Not responsible for where folders live or for which module an adapter fits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.checkpoint_files import (
    CONFIG_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    sha256_of,
)
from engines.lora import AdapterWeights
from engines.peft_config import written_config
from schemas.errors import AlreadyExists, EngineFailure, InvalidRequest
from schemas.operations import LORA_ALPHA, LoraSpec, OptimizerType

_PREFIX = "base_model.model."
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How the safetensors library tells which error of the system it met."""

SLOTS: Mapping[OptimizerType, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "dimuon": ("momentum",)}
"""What each optimizer remembers of a tensor."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer's memory: per slot of its type one float32 tensor for each of `AdapterWeights.tensors`, in order."""

    type: OptimizerType
    step: int
    slots: Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a folder holds; tensors float32 on the CPU. `optimizer` is None if it was not asked for."""

    spec: LoraSpec
    weights: AdapterWeights
    optimizer: OptimizerState | None
    size_bytes: int

    def ordered(self, modules: Sequence[str]) -> SavedState:
        """The same state with its modules in this order (files keep another); `modules` must be the same set."""
        index = {module: position for position, module in enumerate(self.weights.pairs)}
        pairs = {module: self.weights.pairs[module] for module in modules}
        optimizer = self.optimizer
        if optimizer is not None:
            places = [2 * index[module] + side for module in modules for side in (0, 1)]
            slots = {slot: [tensors[place] for place in places] for slot, tensors in optimizer.slots.items()}
            optimizer = replace(optimizer, slots=slots)
        return replace(self, weights=AdapterWeights(pairs, self.weights.scaling), optimizer=optimizer)


def write_adapter(
    folder: Path,
    *,
    spec: LoraSpec,
    weights: AdapterWeights,
    base_model: str,
    all_linears: Iterable[str],
    optimizer: OptimizerState | None = None,
) -> int:
    """Write a complete adapter folder and return its size in bytes.

    The files go into a temporary sibling, are fsynced, read back and compared, and then renamed into place: after a
    crash the folder is there whole or not at all. An empty folder at the place is replaced.

    Args:
        base_model: the public name of the base model, for `base_model_name_or_path`.
        all_linears: module paths of all linears of the base model, to name the targets without ambiguity.

    Raises `AlreadyExists` if a folder with content is there, `EngineFailure` if it cannot be written; nothing is left
    behind then.
    """
    tensors = _named(weights)
    if not tensors or any(tensor.numel() == 0 for tensor in tensors.values()):
        raise EngineFailure("the adapter is empty; nothing was saved")
    if folder.exists() and any(folder.iterdir()):
        raise AlreadyExists("a checkpoint is already stored there")
    files = {WEIGHTS_FILE: tensors}
    if optimizer is not None:
        files[OPTIMIZER_FILE] = _optimizer_tensors(list(tensors), optimizer)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        config = written_config(base_model, spec.rank, _target_modules(weights.pairs, all_linears))
        _write_json(temporary / CONFIG_FILE, config)
        for name, content in files.items():
            _write_tensors(temporary / name, content)
        manifest = {
            "format_version": FORMAT_VERSION,
            "lora": asdict(spec),
            "optimizer": None if optimizer is None else optimizer.type,
            "sha256": {name: sha256_of(temporary / name) for name in (CONFIG_FILE, *files)},
        }
        _write_json(temporary / MANIFEST_FILE, manifest)
        _fsync(temporary)
        os.rename(temporary, folder)
        try:
            _fsync(folder.parent)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # it could vanish with the next power failure
            raise
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise EngineFailure(
            f"the checkpoint could not be written: {_reason(error)}",
            hint="the model and its earlier checkpoints are as they were; save again when the server's disk takes it",
            code="checkpoint_not_written",
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return _size(folder)


def read_adapter(folder: Path, *, with_optimizer: bool = False) -> SavedState:
    """Read a folder and verify it: checksums, geometry, shapes, dtypes, finite values.

    Raises `InvalidRequest` if anything is missing or does not agree, or if the optimizer state is asked for and the
    checkpoint has none.
    """
    manifest = _read_json(folder, MANIFEST_FILE)
    if manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version")
        raise InvalidRequest(f"the checkpoint has format version {found!r}; this server reads {FORMAT_VERSION}")
    spec = _spec(manifest.get("lora"))
    if with_optimizer and manifest.get("optimizer") is None:
        raise InvalidRequest(
            "the checkpoint has no optimizer state",
            field="optimizer",
            hint="load the weights only, or load a training checkpoint",
            code="no_optimizer_state",
        )
    sums = manifest.get("sha256")
    wanted = [CONFIG_FILE, WEIGHTS_FILE, *([OPTIMIZER_FILE] if with_optimizer else [])]
    for name in wanted:
        if not isinstance(sums, dict) or sums.get(name) != sha256_of(_regular(folder, name)):
            raise InvalidRequest(f"the checkpoint is damaged: {name} does not match its checksum")
    config = _read_json(folder, CONFIG_FILE)
    if config.get("r") != spec.rank or config.get("lora_alpha") != LORA_ALPHA:
        raise InvalidRequest(f"the checkpoint is damaged: {CONFIG_FILE} does not match its geometry")
    weights = _pairs(_read_tensors(folder, WEIGHTS_FILE), spec.rank)
    optimizer = None
    if with_optimizer:
        optimizer = _optimizer_state(manifest["optimizer"], _read_tensors(folder, OPTIMIZER_FILE), weights)
    return SavedState(spec, weights, optimizer, _size(folder))


# -- names and configuration -----------------------------------------------------------------------------------------
def _named(weights: AdapterWeights) -> dict[str, Tensor]:
    """PEFT's key -> tensor, in the order of `AdapterWeights.tensors`."""
    named: dict[str, Tensor] = {}
    for module, (down, up) in weights.pairs.items():
        named[f"{_PREFIX}{module}.lora_A.weight"] = down
        named[f"{_PREFIX}{module}.lora_B.weight"] = up
    return named


def _target_modules(adapted: Iterable[str], all_linears: Iterable[str]) -> list[str]:
    """Short names (`q_proj`) where they mean exactly the adapted modules to PEFT's suffix rule, else full paths."""
    exact = set(adapted)
    leaves = {name.rpartition(".")[2] for name in exact}
    meant = {name for name in all_linears if name.rpartition(".")[2] in leaves}
    return sorted(leaves if meant <= exact else exact)


def _spec(value: object) -> LoraSpec:
    fields = {"rank": int, "seed": int, "train_attn": bool, "train_mlp": bool, "train_unembed": bool}
    if not isinstance(value, dict) or any(type(value.get(name)) is not kind for name, kind in fields.items()):
        raise InvalidRequest(f"the checkpoint is damaged: {MANIFEST_FILE} has no valid geometry")
    spec = LoraSpec(**{name: value[name] for name in fields})
    if spec.rank < 1:
        raise InvalidRequest(f"the checkpoint is damaged: rank is {spec.rank}")
    return spec


# -- tensors ---------------------------------------------------------------------------------------------------------
def _pairs(tensors: Mapping[str, Tensor], rank: int) -> AdapterWeights:
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for key, down in tensors.items():
        module, matched, _ = key.removeprefix(_PREFIX).partition(".lora_A.weight")
        if not matched:
            continue
        up = tensors.get(f"{_PREFIX}{module}.lora_B.weight")
        if up is None or down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
            raise InvalidRequest(f"the checkpoint is damaged: {module} has no matching pair of rank {rank}")
        pairs[module] = (down, up)
    if not pairs or len(tensors) != 2 * len(pairs):
        raise InvalidRequest(f"the checkpoint is damaged: {WEIGHTS_FILE} holds other tensors than pairs of an adapter")
    return AdapterWeights(pairs, LORA_ALPHA / rank)


def _optimizer_tensors(keys: Sequence[str], state: OptimizerState) -> dict[str, Tensor]:
    named = {"step": torch.tensor(state.step, dtype=torch.int64)}
    for slot, tensors in state.slots.items():
        named |= {f"{slot}.{key}": tensor for key, tensor in zip(keys, tensors, strict=True)}
    return named


def _optimizer_state(kind: object, tensors: Mapping[str, Tensor], weights: AdapterWeights) -> OptimizerState:
    known = next((name for name in SLOTS if name == kind), None)
    if known is None:
        raise InvalidRequest(
            f"the checkpoint has the state of optimizer {kind!r}; this server knows {', '.join(SLOTS)}",
            field="optimizer",
        )
    shapes = {key: tensor.shape for key, tensor in _named(weights).items()}
    expected = {"step", *(f"{slot}.{key}" for key in shapes for slot in SLOTS[known])}
    if set(tensors) != expected or tensors["step"].numel() != 1 or int(tensors["step"]) < 0:
        raise InvalidRequest(f"the checkpoint is damaged: {OPTIMIZER_FILE} does not fit the adapter")
    slots = {slot: [tensors[f"{slot}.{key}"] for key in shapes] for slot in SLOTS[known]}
    if any(
        tensor.shape != shape for kept in slots.values() for tensor, shape in zip(kept, shapes.values(), strict=True)
    ):
        raise InvalidRequest(f"the checkpoint is damaged: {OPTIMIZER_FILE} has other shapes than the adapter")
    return OptimizerState(known, int(tensors["step"]), slots)


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a safetensors file: float32 and finite (`step` is int64)."""
    try:
        tensors: dict[str, Tensor] = load_file(_regular(folder, name))
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidRequest(f"the checkpoint is damaged: {name} is no valid safetensors file") from error
    for key, tensor in tensors.items():
        if tensor.dtype != (torch.int64 if key == "step" else torch.float32):
            raise InvalidRequest(f"the checkpoint is damaged: {key} is {tensor.dtype}; float32 is expected")
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidRequest(f"the checkpoint is damaged: {key} has values that are not finite")
    return tensors


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write, fsync, and read back: a checkpoint is reported as saved only if the file holds these very tensors."""
    # clone: safetensors refuses tensors that share memory, and later steps must not reach what is being written.
    plain = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})
    _fsync(path)
    written = load_file(path)
    if set(written) != set(plain) or any(not torch.equal(written[key], plain[key]) for key in plain):
        raise EngineFailure(f"the checkpoint could not be written: {path.name} reads back differently")


# -- files -----------------------------------------------------------------------------------------------------------
def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _fsync(path)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(_regular(folder, name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the checkpoint is damaged: {name} is not readable") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"the checkpoint is damaged: {name} is no JSON object")
    return content


def _regular(folder: Path, name: str) -> Path:
    """The path of a plain file in the folder; links are not followed."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise InvalidRequest(f"the checkpoint is incomplete: {name} is missing")
    return path


def _reason(error: OSError | SafetensorError) -> str:
    """Why the disk refused, in the system's words and without a path."""
    if isinstance(error, OSError):
        return error.strerror or "input/output error"
    told = _OS_ERROR.search(str(error))
    return os.strerror(int(told[1])) if told else "input/output error"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
