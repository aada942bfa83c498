"""The baseline: transformers + peft and a training loop, as a user without a server writes it.

The loop is written to be good: sdpa attention, no cache, no retained graph, the loss straight from the logits, the
fused AdamW that the Trainer uses. Its objective is the server's: the sum of -logprob over all real positions.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.training.work import BETAS, EPS, LEARNING_RATE, Example, Outcome, SideSpec, Work
from engines.lora_targets import init_adapter
from schemas.operations import LORA_ALPHA, LoraSpec

IGNORED = -100


class PeftSide:
    """N adapters on one model; clients take turns with `set_adapter`. Base weights of the given dtype, adapters float32
    (peft's default)."""

    def __init__(self, spec: SideSpec) -> None:
        torch.set_num_threads(spec.threads)
        dtype = getattr(torch, spec.dtype)
        base = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=dtype, attn_implementation="sdpa")
        start = [init_adapter(base, lora_spec(spec, client)) for client in range(spec.clients)]
        lora = LoraConfig(
            r=spec.rank,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            target_modules=list(start[0].pairs),
            task_type="CAUSAL_LM",
        )
        self.model: Any = get_peft_model(base, lora, adapter_name="0")
        for client in range(1, spec.clients):
            self.model.add_adapter(str(client), lora)
        self.model.to(spec.device)
        if spec.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()  # there is no dropout anywhere; checkpointing only works in this mode
        self.device = torch.device(spec.device)
        self.optimizers = []
        for client, weights in enumerate(start):
            self.model.set_adapter(str(client))
            mine = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            with torch.no_grad():
                for module, (down, _) in weights.pairs.items():
                    mine[f"base_model.model.{module}.lora_A.{client}.weight"].copy_(down)
            adamw = torch.optim.AdamW(
                mine.values(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
            )
            self.optimizers.append(adamw)
        self.model.set_adapter("0")

    def step(self, work: Work) -> Outcome:
        """Every client in turn, and that `steps` times."""
        rounds = [self._round(work) for _ in range(work.steps)]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Outcome(rounds[0])

    def _round(self, work: Work) -> tuple[float, ...]:
        losses = []
        for client, batch in enumerate(work.clients):
            if len(self.optimizers) > 1:
                self.model.set_adapter(str(client))
            groups = [batch] if work.layout == "padded" else [(example,) for example in batch]
            losses.append(sum(self._backward(group) for group in groups))
            self.optimizers[client].step()
            self.optimizers[client].zero_grad()
        return tuple(losses)

    def _backward(self, group: tuple[Example, ...]) -> float:
        """Add the gradient of these examples in one pass; returns their summed loss."""
        ids, targets, mask = padded(group, self.device)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        torch.autograd.backward(loss)
        return float(loss.detach())

    def cpu_seconds(self) -> float:
        """This process has no children."""
        return time.process_time()

    def close(self) -> None:
        """Nothing was started."""


def lora_spec(spec: SideSpec, client: int) -> LoraSpec:
    """The adapter of one client, on every side."""
    return LoraSpec(rank=spec.rank, seed=client, train_unembed=spec.unembed)


def padded(group: tuple[Example, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Token ids, targets (both int64 [B, L], padded on the right) and the attention mask, None if nothing is padded."""
    longest = max(len(example.tokens) for example in group)
    ids = torch.zeros(len(group), longest, dtype=torch.int64)
    targets = torch.full((len(group), longest), IGNORED, dtype=torch.int64)
    mask = torch.zeros(len(group), longest, dtype=torch.int64)
    for row, example in enumerate(group):
        count = len(example.tokens)
        ids[row, :count] = torch.from_numpy(example.tokens)
        targets[row, :count] = torch.from_numpy(example.targets)
        mask[row, :count] = 1
    ragged = bool((mask == 0).any())
    return ids.to(device), targets.to(device), mask.to(device) if ragged else None
