"""A base model that NeMo Automodel builds, fills and shards, and the proof that it holds what its files say.

Never runs code from the folder. Not responsible for computing with the model.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from transformers import AutoConfig, PreTrainedModel

from engines.automodel.no_gpu import before_import, cpu_instead
from engines.fsdp.group import Ranks
from engines.fsdp.loading import Files, ShardedModel, compared, stored_names
from engines.loading_errors import reading_base_model
from engines.lora_targets import linear_families
from schemas.errors import Unavailable

before_import()

from nemo_automodel import NeMoAutoModelForCausalLM  # noqa: E402
from nemo_automodel._transformers.model_init import get_is_hf_model  # noqa: E402
from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config  # noqa: E402
from nemo_automodel.components.distributed.mesh import ParallelismSizes  # noqa: E402
from nemo_automodel.components.models.common import BackendConfig  # noqa: E402

_log = logging.getLogger(__name__)

_ENGINE = "automodel"
_ELSEWHERE = "use engine 'fsdp' for this base model"


def load_automodel(folder: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> ShardedModel:
    """The model of the folder in evaluation mode, all of its weights in `dtype`, sharded over the ranks if there are
    several. What goes from layer to layer is float32 in any case.

    Raises `Unavailable`; details go to the log only. `read_bytes` are those that this rank has compared.
    """
    with reading_base_model():
        files = Files.of(folder, _ENGINE)
        model = _built(folder, dtype, ranks)
        names = stored_names(model, files)
        read = sum(compared(name, tensor, files, names[name], ranks) for name, tensor in model.named_parameters())
    model.eval().requires_grad_(False)
    _sum_not_mean(model)
    _through_the_root(model)
    if getattr(model, "_uses_hf_attention", False):
        # transformers guesses from the source whether attention is looked up by name; Automodel spells it otherwise.
        type(model)._can_set_attn_implementation_cached_value = True
    if dtype != torch.float32:
        _float32_between_layers(model)
    return ShardedModel(model, read)


def _not_found(report: str) -> str:
    """What a failed read says to clients; a report of torch's has paths and tracebacks in it."""
    missing = re.search(r"Missing key in checkpoint state_dict: ([\w.]*\w)", report)
    name = missing[1] if missing else "a weight"
    return f"engine 'automodel' reads weights as they are stored; {name} is not in the files in Automodel's form"


def _built(folder: Path, dtype: torch.dtype, ranks: Ranks) -> Any:
    """The library's own class for this architecture if it has one, else that of transformers. Frozen before it is
    sharded: embedding, last norm and head then stay together in the root."""
    setup = DistributedSetup.build(
        strategy=FSDP2Config(mp_policy=MixedPrecisionPolicy(), reshard_after_forward=True),
        parallelism_sizes=ParallelismSizes(dp_size=ranks.size),
        world_size=ranks.size,
    )
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    config = AutoConfig.from_pretrained(folder, **options)
    if not get_is_hf_model(config, False):
        # Rotary angles fused by Transformer Engine count positions from the start of a row; packs begin anew in it.
        options["backend"] = BackendConfig(attn="sdpa", linear="torch", rope_fusion=False)
    try:
        with cpu_instead():
            model = NeMoAutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation="sdpa",
                use_liger_kernel=False,
                use_sdpa_patching=False,
                distributed_setup=setup,
                freeze_config={"freeze_modules": [{"glob": "*"}]},
                **options,
            )
    except CheckpointException as error:  # no `Exception`, and it would end the process
        _log.exception("loading the base model failed")
        raise Unavailable(_not_found(str(error)), hint="use engine 'torch', or save it with save_pretrained") from None
    if not isinstance(model, PreTrainedModel) or model.base_model is model:
        raise Unavailable(f"{type(model).__name__} of Automodel has no body and head as others have", hint=_ELSEWHERE)
    return model


def _sum_not_mean(model: nn.Module) -> None:
    """Whatever FSDP may come to reduce is a sum, as all gradients here are; gloo has no mean."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _through_the_root(built: Any) -> None:
    """Let passes through the body gather and free what belongs to the root.

    The library makes the whole model the root, with embedding, last norm and head in it; passes call the body alone.
    """
    if not isinstance(built, FSDPModule):
        return
    model: Any = built
    body = model.base_model
    model.body_forward = body.forward
    register_fsdp_forward_method(model, "body_forward")
    body.forward = model.body_forward


def _float32_between_layers(model: Any) -> None:
    """Linears with adapters give float32 from weights of any dtype, and norms follow their input; so does all that is
    between, if the embedding starts with it. Raises `Unavailable` where a linear without an adapter is in the way."""
    known = linear_families(model)
    other = next((n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in known), None)
    if other is not None:
        raise Unavailable(f"engine 'automodel' needs dtype float32 for this base model, because of {other}")
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.float())
