"""What a loaded base model tells about itself: its size, its layers, the memory that training it takes.

Plain frozen dataclasses, as operations are: they cross the process border with the news that the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a base model and its training need, in bytes, and what there is; zeros where nothing is known.

    A training pass over datums of n1, n2, ... tokens keeps about `per_token * sum(n) + per_token_pair * sum(n^2)` bytes
    for its backward pass; with gradient checkpointing `per_token_checkpointed * sum(n)` and the pairs of one layer.
    """

    base: int = 0
    """Weights and buffers of the base model."""
    per_adapter_parameter: int = 0
    """Of a training run while an operation is open: weight, gradient, two moments and the operation's own gradient."""
    adapter_parameters_per_rank: int = 0
    """Trainable parameters of an adapter on everything that can be adapted, divided by its rank."""
    per_token: int = 0
    per_token_checkpointed: int = 0
    per_token_pair: int = 0
    """Greater than 0 only where attention keeps its scores."""
    layers: int = 1
    head: int = 0
    """Blocks of logits that the output head holds at a time."""
    total: int = 0
    """Of the device, or what the control group lets the process have if that is less."""
    free: int = 0
    """What of it was free when the base model was loaded."""

    def adapter(self, rank: int) -> int:
        """Bytes of one training run of this rank on everything that can be adapted."""
        return self.per_adapter_parameter * self.adapter_parameters_per_rank * rank

    def training_pass(self, lengths: Sequence[int], *, checkpointing: bool = False) -> int:
        """Bytes of one pass, forward and backward, over datums of these lengths."""
        tokens, pairs = sum(lengths), self.per_token_pair * sum(length * length for length in lengths)
        if checkpointing:
            return self.head + self.per_token_checkpointed * tokens + pairs // self.layers
        return self.head + self.per_token * tokens + pairs

    @property
    def text(self) -> str:
        """One line for people."""
        if not self.total:
            return "memory: not known"
        return (
            f"memory: base {_gb(self.base)}, each rank-32 adapter {_gb(self.adapter(32))}, 1,024 tokens of a training "
            f"pass {_gb(self.training_pass([1024]))} ({_gb(self.training_pass([1024], checkpointing=True))} with "
            f"gradient checkpointing), of {_gb(self.total)} with {_gb(self.free)} free"
        )


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer that adapters can cover: its module path, its family, and its weight's shape [out, in]."""

    name: str
    family: Literal["attn", "mlp", "unembed"]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """What a loaded base model tells about itself."""

    vocab_size: int
    context_length: int
    dtype: str
    num_layers: int
    parameters: int
    eos_token_ids: tuple[int, ...]
    adapter_families: frozenset[Literal["attn", "mlp", "unembed"]]
    """The families of linear layers that the model has, i.e. which `train_*` flags can be honoured."""
    micro_batch_tokens: int = 512
    """How many tokens a turn of many training runs should have together (`MicroBatch`)."""
    packed: bool = False
    """Whether a turn's datums go through the base model together."""
    batch_invariant: bool = False
    """Whether an operation's numbers are bit for bit independent of what else is computed beside it."""
    peak_flops: float = 0.0
    """Measured peak of matrix products on all threads of the worker, FLOP/s; 0 = unknown."""
    memory: MemoryEstimate = field(default_factory=MemoryEstimate)
    linears: tuple[Linear, ...] = ()
    """Every linear layer of the families in `adapter_families`, in model order: what an adapter's tensors must fit."""


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size < 10e9 else f"{size / 1e9:,.0f} GB"
