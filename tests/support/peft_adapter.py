"""Whether an exported adapter is what PEFT understands."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.server import RunningServer


def assert_loads_in_peft(folder: Path, server: RunningServer) -> None:
    """The folder has PEFT's files, and every tensor in them finds its place in the server's base model."""
    assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    base = next((server.data_dir / "base_models").glob("*/config.json")).parent
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    loaded = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(loaded) == len(load_file(folder / "adapter_model.safetensors"))
