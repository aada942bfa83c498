"""Operations: the accepted requests in the form in which workers execute them, and their results.

Plain frozen dataclasses over numpy arrays, so that they pickle cheaply across a process border and import nothing
heavy. Everything here has been validated at the edge; engines check again only what they alone know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from schemas.errors import TinsmithError

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

LORA_ALPHA = 32
"""Of every adapter, so that its update is scaled by `32 / rank` (what Tinker's hosted service documents)."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Geometry of an adapter. `seed` is always set (the edge draws one if the client gave none)."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Datum:
    """One training example of N tokens; position i of every input is about the token after `tokens[i]`.

    `tokens` int64 [N]; `inputs["target_tokens"]` int64 [N] or [N, K]; every other input float32 of the target's shape
    (`[N]` for the per-position ones). Dense: CSR was resolved at the edge.
    """

    tokens: Int64
    inputs: Mapping[str, NDArray[np.float32] | NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The body of one `forward_backward` (or, with `backward=False`, one `forward`) of one adapter."""

    adapter_id: str
    datums: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    """Overrides of the loss's defaults (`schemas.losses.LOSSES`)."""
    backward: bool = True
    loss_graph: str | None = None
    """Of `custom`: JSON of {"inputs", "nodes"} (`schemas/custom_loss.py`); inputs then keep the dtype they came in."""
    again: bool = False
    """Whether it succeeded before, and is executed once more to bring its run back. Nothing that depends on the moment,
    as the time that it takes does, may fail it then. Not stored: only whoever executes it knows."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """`logprobs[i]` float32 of the shape of datum i's `target_tokens`; metric names have exactly one colon."""

    logprobs: tuple[Float32, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OptimStepParams:
    """Overrides of every parameter group for one step. `None` means: leave the group's own value."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class DimuonStepParams:
    """The same for Dimuon (`docs/optimizers.md`)."""

    lr: float | None = None
    beta1: float | None = None
    damping: float | None = None
    rank_lr_correction_exponent: float | None = None


StepParams = OptimStepParams | DimuonStepParams
OptimizerType = Literal["adamw", "dimuon"]
"""The optimizer of a training run, fixed when it is created."""


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Make a fresh adapter (request 0 of a training run)."""

    lora: LoraSpec
    optimizer: OptimizerType = "adamw"


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load a checkpoint folder into a new adapter (`create`) or into the live one.

    `optimizer` is that of a new adapter; None = the saved one's with its state, else AdamW.
    """

    folder: str
    with_optimizer: bool
    create: bool
    optimizer: OptimizerType | None = None


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One optimizer step. `grad_clip_norm` 0 = off (global 2-norm over the adapter)."""

    params: StepParams
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class ZeroGrad:
    """Clear the accumulated gradient of the adapter."""


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Write the adapter (and, for a training checkpoint, the optimizer state) as a new, complete folder."""

    folder: str
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of an optimizer step: `grad_norm` (before clipping), `learning_rate`, `update_norm`."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """What a completed save or load tells: size on disk and the geometry of the adapter."""

    size_bytes: int
    lora: LoraSpec


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A file with the whole state of an adapter, durable on disk: its size in bytes and its SHA-256 (hex)."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw. `max_tokens` None = to the end of the context; `stop` None = at end of sequence, `()` = never."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One `asample`: `num_samples` continuations of one prompt by one adapter (`adapter_folder` None = base model)."""

    prompt: Int64
    params: SamplingParams
    num_samples: int = 1
    adapter_folder: str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Int64 | None = None
    """Token ids to score, int64 [L-1, K]; row i scores prompt position i+1; -1 asks nothing."""
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    plain_logprobs: bool = False
    """Whether the sequences carry the model's own logprobs beside the reported ones."""
    stream: bool = False
    """Whether new tokens are told as they are drawn (`SampleDelta`)."""
    cache_domain: str = ""
    """Prompts share what was computed for their common beginning only within one domain (a project)."""

    def most_tokens(self, context_length: int) -> int:
        """The most tokens that its rows can hold at once: what it may need of the key-value cache."""
        length = len(self.prompt)
        drawn = context_length - length if self.params.max_tokens is None else self.params.max_tokens
        return self.num_samples * (length + max(0, drawn))


@dataclass(frozen=True, slots=True)
class TopK:
    """Top-k alternatives per position: `ids` int32 and `logprobs` float32, both [length, k], best first."""

    ids: NDArray[np.int32]
    logprobs: Float32


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One continuation. The stop token (or the tokens of the stop string) is the end of `tokens`."""

    tokens: NDArray[np.int32]
    logprobs: Float32
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None
    plain_logprobs: Float32 | None = None
    """log softmax(logits) of the tokens, at temperature 1, float32 [n]; only if the request asked for it."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """`prompt_logprobs` float32 [L] with NaN where not scored (always at 0); `target_prompt_logprobs` [L-1, K]."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: Float32 | None = None
    topk_prompt_logprobs: TopK | None = None
    target_prompt_logprobs: Float32 | None = None
    prompt_alt_tokens: TopK | None = None
    """k draws per position after the first, [L-1, k]."""
    prompt_cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New tokens of one sequence of a request: int32 [n], their logprobs float32 [n], and [n, k] alternatives if the
    request asked for `topk_sample_logprobs` (None: they come with the result).

    `stop_reason` comes with a sequence's last token, or with the result only."""

    index: int
    tokens: NDArray[np.int32]
    logprobs: Float32
    topk: TopK | None = None
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One turn of a sampling engine: forget `cancelled`, take `added` in, then step.

    It steps `steps` times, and on until `seconds` have passed; it ends early when room for other requests was made.
    """

    added: Mapping[str, Sample] = field(default_factory=dict)
    cancelled: tuple[str, ...] = ()
    steps: int = 8
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplerLoad:
    """How full a sampling engine is. `waiting` requests were taken in but have no room yet; tokens are those of the
    key-value cache, cached prefixes that may be dropped apart (`prefix_tokens`)."""

    active: int = 0
    """Requests taken in and not ended, waiting ones included."""
    waiting: int = 0
    rows: int = 0
    max_rows: int = 0
    tokens: int = 0
    max_tokens: int = 0
    prefix_tokens: int = 0
    preempted: int = 0
    """Requests whose cache was put aside for want of room."""


@dataclass(frozen=True, slots=True)
class SampleStats:
    """What a sampling engine did: tokens of prompts that were read or found in the prefix cache, tokens drawn."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    drawn_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleTurnResult:
    """The requests that ended in this turn, those that it forgot with `Cancelled`, and the new tokens of those that
    stream."""

    ended: Mapping[str, SampleResult | TinsmithError]
    deltas: Mapping[str, tuple[SampleDelta, ...]] = field(default_factory=dict)
    load: SamplerLoad = field(default_factory=SamplerLoad)
    stats: SampleStats = field(default_factory=SampleStats)


@dataclass(frozen=True, slots=True)
class DatumRange:
    """Datums [start, stop) of an open operation, to be computed in one turn."""

    operation_id: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """An optimizer step that is taken together with those of other adapters."""

    operation_id: str
    adapter_id: str
    step: OptimStep


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One turn of a worker for many training runs: forget, open, compute, step, in this order.

    `opened` are the operations that begin here (each is sent once, whole); `ranges` are datums of open operations,
    those of one operation in order and without gaps, those of one adapter in the order of its operations; `steps` have
    at most one entry per adapter; `dropped` are operations that nobody waits for any more.
    """

    opened: Mapping[str, TrainBatch] = field(default_factory=dict)
    ranges: tuple[DatumRange, ...] = ()
    steps: tuple[AdapterStep, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PassStats:
    """What one micro-batch cost. `tokens` were asked for, `rows` were computed (the rest aligned kernels).

    `seconds` by part: base (everything in the model that is not named here), lora, head, optimizer; they add up to
    the whole turn. `flops` are those of the base model's products (forward, and backward where it ran).
    """

    tokens: int = 0
    rows: int = 0
    sequences: int = 0
    passes: int = 0
    flops: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """The operations and steps that ended in this turn, each with its result or its own error."""

    outcomes: Mapping[str, TrainResult | StepResult | TinsmithError]
    stats: PassStats = field(default_factory=PassStats)


TrainingOperation = CreateModel | LoadWeights | TrainBatch | OptimStep | ZeroGrad | SaveWeights
Operation = TrainingOperation | Sample
OperationResult = TrainResult | StepResult | SavedAdapter | SampleResult | None
