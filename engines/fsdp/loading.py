"""A base model of which every rank reads and keeps only its own slices.

The model is built without weights, sharded, and filled from the safetensors files row range by row range; no process
ever holds all of it. Never runs code from the folder. Not responsible for computing with it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from engines.fsdp.group import Ranks
from engines.loading_errors import reading_base_model
from engines.torch_engine.checkpointing import decoder_layers
from engines.torch_engine.precision import convert
from schemas.errors import Unavailable

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True)
class ShardedModel:
    """The model, and how many of the bytes of its files this rank has read."""

    model: Any
    read_bytes: int


def load_sharded(folder: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> ShardedModel:
    """The model of the folder in evaluation mode, in the precision of `precision.convert`, sharded over the ranks.

    Raises `Unavailable`; details go to the log only.
    """
    with reading_base_model():
        files = Files.of(folder)
        model = _blueprint(folder)
        names = stored_names(model, files)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(files.dtype(names[name]))
        convert(model, dtype)
        model.eval().requires_grad_(False)
        _shard(model, device, ranks)
        read = sum(_fill(parameter, files, names[name], ranks) for name, parameter in model.named_parameters())
        read += _fill_buffers(model, files)
    _log.info("rank %d of %d has read %.1f MB of the base model", ranks.rank, ranks.size, read / 1e6)
    return ShardedModel(model, read)


# -- without weights --------------------------------------------------------------------------------------------------
def _blueprint(folder: Path) -> Any:
    """The architecture: parameters without memory, buffers (rotary angles, say) with their real values."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if (folder / GENERATION_CONFIG_NAME).exists():  # it may name other ends of a sequence than the model's own file
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are registered inside have shapes only; a tied one stays the same object."""

    def replace(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def _shard(model: Any, device: torch.device, ranks: Ranks) -> None:
    """Shard every layer, and the rest (embedding, last norm, output head) as one group; slices get memory.

    The head is no part of the body, whose forward is what passes call; it is made one for as long as it takes to put
    its weight into the body's group, so that it is whole whenever the embedding is, tied to it or not.
    """
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or head is None:
        raise Unavailable(f"{type(model).__name__} has no backbone and head of its own; engine 'fsdp' cannot shard it")
    tied = head.weight is model.get_input_embeddings().weight
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mesh = init_device_mesh(device.type, (ranks.size,), mesh_dim_names=("fsdp",))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    body.add_module("output_head", head)
    try:
        fully_shard(body, mesh=mesh, reshard_after_forward=False)
        body.to_empty(device=device)
    finally:
        del body._modules["output_head"]
    if tied:
        head.weight = model.get_input_embeddings().weight
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


# -- weights ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Files:
    """The safetensors files of a folder, read by ranges of rows."""

    folder: Path
    places: dict[str, str]
    """Name of a tensor -> file."""
    engine: str = "fsdp"
    """Who reads, for errors."""
    _open: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, engine: str = "fsdp") -> Files:
        index = folder / _INDEX
        if index.exists():
            return cls(folder, dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"]), engine)
        file = "model.safetensors"
        with safe_open(folder / file, framework="pt") as tensors:
            return cls(folder, dict.fromkeys(tensors.keys(), file), engine)

    def slices(self, name: str) -> Any:
        """The tensor as something to be indexed; nothing is read yet."""
        file = self.places[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file].get_slice(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored. Raises `Unavailable` for one of integers or of 8 bits."""
        stored = self.slices(name).get_dtype()
        if stored not in _DTYPES:
            raise Unavailable(
                f"engine {self.engine!r} reads weights of {', '.join(_DTYPES)}; {name} is stored as {stored}"
            )
        return _DTYPES[stored]


def stored_names(model: Any, files: Files) -> dict[str, str]:
    """Name of each parameter -> that of its tensor in the files, with or without the prefix of the body.

    Raises `Unavailable` for a model whose files keep weights in another form than the model does.
    """
    prefix = f"{model.base_model_prefix}."
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        stored = next((each for each in (name, name.removeprefix(prefix)) if each in files.places), None)
        if stored is None and parameter is model.get_input_embeddings().weight:
            stored = "lm_head.weight" if "lm_head.weight" in files.places else None  # tied, kept under the other name
        if stored is None or files.slices(stored).get_shape() != list(parameter.shape):
            raise Unavailable(
                f"engine {files.engine!r} reads weights as they are stored; {name} of {type(model).__name__} is not "
                "in the files in the form in which the model has it",
                hint="use engine 'torch' for this model, or save it again with save_pretrained",
            )
        found[name] = stored
    return found


@torch.no_grad()
def _fill(parameter: Tensor, files: Files, name: str, ranks: Ranks) -> int:
    """Read this rank's rows of a parameter; returns their bytes in the file."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    start, stop = rows_of(int(parameter.shape[0]), ranks)
    if local.shape[0] != stop - start:
        raise Unavailable(f"engine 'fsdp': the shard of {name} has {local.shape[0]} rows, not {stop - start}")
    if start == stop:
        return 0
    part: Tensor = files.slices(name)[start:stop]
    local.copy_(part)
    return part.numel() * part.element_size()


@torch.no_grad()
def compared(name: str, parameter: Tensor, files: Files, stored: str, ranks: Ranks) -> int:
    """Bytes read to see that this rank's part of a parameter is what the files say, bit for bit.

    For models that a library has filled: what it does not recognise it leaves as it was, and tells its log only.
    Raises `Unavailable`.
    """
    rows = int(parameter.shape[0])
    start, stop = rows_of(rows, ranks) if isinstance(parameter, DTensor) else (0, rows)
    if start == stop:
        return 0
    part: Tensor = files.slices(stored)[start:stop]
    local = _local(parameter)
    if not torch.equal(local, part.to(local)):
        raise Unavailable(
            f"engine {files.engine!r}: the library did not load {name} as it is stored", hint="use engine 'fsdp'"
        )
    return part.numel() * part.element_size()


def rows_of(rows: int, ranks: Ranks) -> tuple[int, int]:
    """[start, stop) of this rank: equal parts but for the last ones, as `torch.chunk` makes them."""
    each = -(-rows // ranks.size)
    return min(ranks.rank * each, rows), min((ranks.rank + 1) * each, rows)


@torch.no_grad()
def _fill_buffers(model: Any, files: Files) -> int:
    """Read buffers that are stored, whole: they are small. Returns their bytes."""
    read = 0
    for name, buffer in model.named_buffers():
        if name in files.places:
            stored: Tensor = files.slices(name)[:]
            buffer.copy_(stored)
            read += stored.numel() * stored.element_size()
    return read


def whole(weight: Tensor) -> Tensor:
    """All rows of a weight, sharded or not; every rank must ask for the same ones in the same order."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def local_bytes(model: nn.Module) -> int:
    """Bytes of weights and buffers that this rank keeps."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def gathered_bytes(model: Any) -> int:
    """Bytes of whole weights that a pass holds at once: the rest's group and two layers. None of a model that a
    library has left whole."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return 0
    layers = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in decoder_layers(model)]
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return int(total - sum(layers) + 2 * max(layers, default=0))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
