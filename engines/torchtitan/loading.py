"""torchtitan builds the decoder without weights and shards it; every rank reads its own rows of the files.

torchtitan is imported only where it is used: `_choose_device` has to come before its other modules. Never runs code
from the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from engines.fsdp.group import Ranks
from engines.fsdp.loading import ShardedModel
from engines.loading_errors import reading_base_model
from engines.torchtitan.families import Family, decoder_config, family_of
from engines.torchtitan.model import TitanModel
from schemas.errors import Unavailable

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_COMPUTED = "rotary_emb.inv_freq"
"""A tensor that old files have and nobody needs."""


def load_titan(folder: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> ShardedModel:
    """The model of the folder, its weights in `dtype`, sharded over the ranks. Raises `Unavailable`; details go to
    the log only."""
    with reading_base_model():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        generation = None
        if (folder / GENERATION_CONFIG_NAME).exists():
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        family = family_of(config)
        _choose_device(device)
        attention, masks = _attention(dtype, device)
        titan_config = decoder_config(family, config, attention)
        decoder = _built(titan_config, dtype)
        _shard(family, decoder, dtype, device, ranks)
        read = _fill(family, titan_config, decoder, folder)
        decoder.requires_grad_(False).eval()
        if dtype != torch.float32:
            decoder.tok_embeddings.register_forward_hook(lambda _module, _args, output: output.float())
        return ShardedModel(TitanModel(decoder, family, config, generation, masks), read)


def _choose_device(device: torch.device) -> None:
    """torchtitan takes the first accelerator there is, and a GPU where there is none; its modules copy these names."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = device.type, torch.get_device_module(device)


def _attention(dtype: torch.dtype, device: torch.device) -> tuple[Any, bool]:
    """The configuration of the attention kernel, and whether it tells several sequences in a row apart.

    torchtitan's varlen kernel does; it needs a GPU, and rounds its operands to bfloat16. Elsewhere it is torch's
    scaled_dot_product_attention, over one sequence at a time: flex attention has no backward pass on the CPU.
    """
    from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention

    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0):
        return VarlenAttention.Config(), True
    return ScaledDotProductAttention.Config(), False


def _built(titan_config: Any, dtype: torch.dtype) -> Any:
    """The decoder without memory, its parameters of this dtype; all layers share one table of rotary angles."""
    with torch.device("meta"):
        decoder = titan_config.build()
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
    first, *others = (block.attention for block in decoder.layers.values())
    for attention in others:
        attention.rope = first.rope
    return decoder


def _shard(family: Family, decoder: Any, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
    """torchtitan's own way of sharding, over all ranks; memory for this rank's slices, and the rotary angles."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

    parallelism = ParallelismConfig(data_parallel_shard_degree=ranks.size, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, ranks.size)
    dims.build_mesh()
    _parallelize(family)(
        decoder,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=_DTYPES[dtype], disable_cuda_graphs=True),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    decoder.to_empty(device=device)
    with torch.no_grad():
        decoder.init_states()


def _parallelize(family: Family) -> Any:
    if family.name == "llama3":
        from torchtitan.models.llama3.parallelize import parallelize_llama

        return parallelize_llama
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3

    return parallelize_qwen3


def _adapter(family: Family, titan_config: Any) -> Any:
    if family.name == "llama3":
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

        return Llama3StateDictAdapter(titan_config, None)
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    return Qwen3StateDictAdapter(titan_config, None)


def _fill(family: Family, titan_config: Any, decoder: nn.Module, folder: Path) -> int:
    """Read this rank's rows of every parameter; returns their bytes in the files.

    torchtitan's adapter of state dicts tells which tensor of the files a parameter is. Rows stay as they are in the
    files, though: the adapter would reorder those of q and k, and here the outputs are (`model.Projection`), so that
    what is trained on them is Hugging Face's.
    """
    adapter = _adapter(family, titan_config)
    reader = adapter.get_hf_storage_reader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        for key in adapter.to_hf({name: torch.empty(parameter.shape, device="meta")}):
            wanted[key] = parameter.detach()
    _check(family, wanted, stored, tied=titan_config.enable_weight_tying)
    load(wanted, storage_reader=reader)
    return sum(_local(tensor).numel() * stored[key].properties.dtype.itemsize for key, tensor in wanted.items())


def _check(family: Family, wanted: dict[str, Tensor], stored: dict[str, Any], *, tied: bool) -> None:
    """Raise `Unavailable` unless the files have exactly the tensors that the model has, in the form it has them."""
    ignored = {"lm_head.weight"} if tied else set()
    for key in sorted(wanted.keys() | stored.keys()):
        if key in wanted:
            found = stored.get(key)
            if found is not None and found.size == wanted[key].shape and found.properties.dtype.is_floating_point:
                continue
        elif key in ignored or key.endswith(_COMPUTED):
            continue
        missing = "is not in the files in the form in which it" if key in wanted else "is in the files, and not what it"
        raise Unavailable(
            f"engine 'torchtitan' reads weights as they are stored; {key} {missing} has in torchtitan's {family.name}",
            hint="use engine 'torch' for this model, or save it again with save_pretrained",
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
