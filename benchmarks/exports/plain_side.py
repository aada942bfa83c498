"""What plain transformers, with PEFT or without, says of the same tokens. Imports nothing of the project.

    python plain_side.py    reads {"model", "adapter", "sequences", "prompts", "tokens"} from stdin

`sequences` are token ids whose distributions are asked for, `prompts` those to continue greedily by `tokens`. Writes
{"logprobs": [per sequence [position][vocabulary]] as a file of numpy's, "greedy": [per prompt]}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def loaded(model: str, adapter: str | None) -> Any:
    """The model in float32, as `from_pretrained` gives it."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is None:
        return base.eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(base, adapter).eval()


def main() -> None:
    order = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    model = loaded(order["model"], order["adapter"])
    with torch.inference_mode():
        for number, ids in enumerate(order["sequences"]):
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            np.save(f"{order['output']}.{number}.npy", logprobs.numpy())
        greedy = []
        for ids in order["prompts"]:
            prompt = torch.tensor([ids])
            made = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=order["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
            greedy.append(made[0, len(ids) :].tolist())
    json.dump({"greedy": greedy}, sys.stdout)


if __name__ == "__main__":
    main()
