"""An adapter added into the weights of its base model: a model folder that any program loads without PEFT.

    python -m engines.merge    reads {"base", "adapter", "output", "dtype"} from stdin, tells its steps on stdout

The folder has the base's architecture and tokenizer, safetensors, and no trace of an adapter; an adapted head that was
tied to the input embedding gets weights of its own. Sums are made in float32 and rounded once. A process of its own: it
needs the memory of a whole model. Not responsible for fetching the adapter.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engines.checkpoint_files import CONFIG_FILE, WEIGHTS_FILE
from schemas.errors import InvalidRequest, TinsmithError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What programs read beside the weights; those that the base has are copied as they are."""
_PREFIX = "base_model.model."


def merge(
    base: Path, adapter: Path, output: Path, dtype: str | None = None, tell: Callable[[str], None] = lambda step: None
) -> None:
    """Write `output`, a new folder.

    Args:
        base: folder of the base model (`config.json`, safetensors, tokenizer).
        adapter: folder of a PEFT adapter, as the server writes them.
        dtype: of the written weights; None = that of the base.
        tell: called with what is done now.

    Raises `InvalidRequest` if the adapter does not fit the base, or a merged weight is beyond the range of `dtype`.
    """
    config = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
    pairs = _pairs(load_file(adapter / WEIGHTS_FILE))
    if not (base / "config.json").is_file():
        raise InvalidRequest("base: there is no config.json in its folder", field="base")
    tell("reading the base model")
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    scaling = float(config["lora_alpha"]) / int(config["r"])
    tell(f"adding {len(pairs)} adapted layers")
    with torch.no_grad():
        _untie_head(model, pairs)
        for name, (down, up) in pairs.items():
            linear = _linear(model, name)
            kind = linear.weight.dtype if dtype is None else DTYPES[dtype]
            linear.weight = nn.Parameter(_sum(linear.weight, name, down, up, scaling, kind), requires_grad=False)
        if dtype is not None:
            model.to(DTYPES[dtype])
    tell("writing the merged model")
    model.save_pretrained(output, safe_serialization=True)
    for name in TOKENIZER_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, output / name)


def _pairs(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Module path -> (A [r, in], B [out, r])."""
    found = {}
    for key, down in tensors.items():
        module, matched, _ = key.removeprefix(_PREFIX).partition(".lora_A.weight")
        if matched:
            found[module] = (down, tensors[f"{_PREFIX}{module}.lora_B.weight"])
    if len(tensors) != 2 * len(found):
        raise InvalidRequest("adapter: it holds other tensors than pairs of an adapter", field="adapter")
    return found


def _untie_head(model: Any, pairs: dict[str, Any]) -> None:
    """Give an adapted head weights of its own: the embedding that it shares them with must stay as it is."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    if any(module is head for name, module in model.named_modules() if name in pairs):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for each in (model.config, model.config.get_text_config()):
            each.tie_word_embeddings = False


def _linear(model: Any, name: str) -> nn.Linear:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear):
        raise InvalidRequest(f"adapter: the base model has no linear layer {name!r}", field="adapter")
    return module


def _sum(weight: Tensor, name: str, down: Tensor, up: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """weight + scaling * B A, in float32, rounded to `dtype`."""
    if down.shape[1] != weight.shape[1] or up.shape[0] != weight.shape[0] or down.shape[0] != up.shape[1]:
        raise InvalidRequest(f"adapter: the tensors of {name!r} do not fit the base model", field="adapter")
    merged = weight.float().addmm(up.float(), down.float(), alpha=scaling).to(dtype)
    if not bool(torch.isfinite(merged).all()):
        raise InvalidRequest(f"dtype: merged weights of {name!r} are beyond its range", field="dtype")
    return merged


def _tell(step: str) -> None:
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


def main() -> int:
    """Read an order from stdin, do it; returns the exit code, with one line on stderr if it is not 0."""
    order = json.loads(sys.stdin.read())
    try:
        merge(Path(order["base"]), Path(order["adapter"]), Path(order["output"]), order["dtype"], _tell)
    except TinsmithError as error:
        sys.stderr.write(f"\n{error.message}\n")
        return 1
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"\n{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
