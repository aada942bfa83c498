"""A scripted engine and sampler that do real, tiny arithmetic: one weight per adapter.

logprob_i = w * target_i; loss = -sum(weights_i * w * target_i); gradient = -sum(weights_i * target_i);
w -= lr * gradient.
`loss_config` may ask for trouble: `sleep` seconds, `raise` an unexpected error, `die` by SIGKILL, be refused when it
is opened (`refuse`) or when datum n is computed (`fail_at`: n). A sample draws
(prompt[-1] + adapter weight + i) % 100; a prompt that starts with 666 kills the worker at its first step, 667 raises
there, and 668 is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.base import BaseEngine
from engines.sampling.base import SampleStep, SamplingEngine
from schemas.base_model_info import BaseModelInfo
from schemas.errors import Cancelled, InvalidRequest, ModelLost, NonFiniteGradient, NotFound, TinsmithError, Unavailable
from schemas.operations import (
    DatumRange,
    LoraSpec,
    OptimizerType,
    PassStats,
    Sample,
    SampleDelta,
    SampledSequence,
    SampleResult,
    SamplerLoad,
    SampleStats,
    SavedAdapter,
    SavedSnapshot,
    StepParams,
    StepResult,
    TopK,
    TrainBatch,
    TrainResult,
)
from workers.build import Progress
from workers.spec import WorkerSpec
from workers.tinker import TinkerActorRolloutRefWorker

INFO = BaseModelInfo(100, 64, "float32", 1, 1, (2,), frozenset({"attn", "mlp", "unembed"}))
KILL_PROMPT, RAISE_PROMPT, REFUSE_PROMPT = 666, 667, 668


class ToyAdapter:
    def __init__(self, lora: LoraSpec) -> None:
        self.lora = lora
        self.weight = float(lora.seed)
        self.gradient = 0.0
        self.stage: float | None = None
        self.steps = 0


class ToyEngine(BaseEngine):
    def __init__(self, name: str = "toy") -> None:
        super().__init__()
        self.name = name
        self.adapters: dict[str, ToyAdapter] = {}
        self.computed = PassStats()

    @classmethod
    def check(cls) -> None:
        return None

    def load(self) -> BaseModelInfo:
        if self.name == "broken":
            raise Unavailable("base model 'broken' has no weights")
        return INFO

    def adapter(self, adapter_id: str) -> ToyAdapter:
        if adapter_id not in self.adapters:
            raise NotFound(f"there is no adapter {adapter_id!r}")
        return self.adapters[adapter_id]

    def create_adapter(self, adapter_id: str, lora: LoraSpec, optimizer: OptimizerType = "adamw") -> int:
        if lora.rank < 1:
            raise InvalidRequest(f"rank {lora.rank} is not positive", field="lora_config.rank")
        self.adapters[adapter_id] = ToyAdapter(lora)
        return 1

    def remove_adapter(self, adapter_id: str) -> None:
        self.adapters.pop(adapter_id, None)

    def save_adapter(self, adapter_id: str, folder: Path, *, with_optimizer: bool) -> SavedAdapter:
        adapter = self.adapter(adapter_id)
        folder.mkdir(parents=True)
        text = json.dumps({"weight": adapter.weight, "rank": adapter.lora.rank, "steps": adapter.steps})
        (folder / "toy.json").write_text(text)
        return SavedAdapter(len(text), adapter.lora)

    def load_adapter(
        self,
        adapter_id: str,
        folder: Path,
        *,
        with_optimizer: bool,
        create: bool,
        optimizer: OptimizerType | None = None,
    ) -> SavedAdapter:
        if not (folder / "toy.json").exists():
            raise NotFound("the checkpoint does not exist")
        content = json.loads((folder / "toy.json").read_text())
        if create:
            self.adapters[adapter_id] = ToyAdapter(LoraSpec(content["rank"], seed=0))
        adapter = self.adapter(adapter_id)
        adapter.weight, adapter.gradient = content["weight"], 0.0
        return SavedAdapter(1, adapter.lora)

    def snapshot_adapter(self, adapter_id: str, path: Path) -> Callable[[], SavedSnapshot]:
        adapter = self.adapter(adapter_id)
        state = {"lora": asdict(adapter.lora), "weight": adapter.weight, "gradient": adapter.gradient}
        text = json.dumps(state | {"steps": adapter.steps})

        def write() -> SavedSnapshot:
            path.write_text(text)
            return SavedSnapshot(len(text), hashlib.sha256(text.encode()).hexdigest())

        return write

    def restore_adapter(self, adapter_id: str, path: Path, sha256: str) -> None:
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise ModelLost("the snapshot is damaged")
        state = json.loads(path.read_text())
        adapter = self.adapters[adapter_id] = ToyAdapter(LoraSpec(**state["lora"]))
        adapter.weight, adapter.gradient, adapter.steps = state["weight"], state["gradient"], state["steps"]

    def _open_stage(self, adapter_id: str) -> None:
        self.adapter(adapter_id).stage = 0.0

    def _close_stage(self, adapter_id: str, *, keep: bool) -> None:
        adapter = self.adapter(adapter_id)
        assert adapter.stage is not None
        adapter.gradient += adapter.stage if keep else 0.0
        adapter.stage = None

    def forward(self, batch: TrainBatch) -> TrainResult:
        self._misbehave(batch)
        weight = self.adapter(batch.adapter_id).weight
        logprobs = tuple((weight * d.inputs["target_tokens"]).astype(np.float32) for d in batch.datums)
        loss = sum(float(-(d.inputs["weights"] * p).sum()) for d, p in zip(batch.datums, logprobs, strict=True))
        metrics = {"loss:sum": loss}
        if "logprobs" in batch.datums[0].inputs:
            gaps = np.concatenate([abs(p - d.inputs["logprobs"]) for d, p in zip(batch.datums, logprobs, strict=True)])
            metrics |= {"logprob_gap_abs:mean": float(gaps.mean()), "logprob_gap_abs:max": float(gaps.max())}
        return TrainResult(logprobs, metrics)

    def forward_backward(self, batch: TrainBatch) -> TrainResult:
        adapter = self.adapter(batch.adapter_id)
        assert adapter.stage is not None, "forward_backward outside train_mode"
        for datum in batch.datums:
            adapter.stage += float(-(datum.inputs["weights"] * datum.inputs["target_tokens"]).sum())
        return self.forward(batch)

    def open_operation(self, operation_id: str, batch: TrainBatch) -> None:
        self.adapter(batch.adapter_id)
        if batch.loss_config.get("refuse"):
            raise InvalidRequest("the toy refuses this batch", field="loss_config")
        super().open_operation(operation_id, batch)

    def compute(self, ranges: Sequence[DatumRange]) -> Mapping[str, TrainResult | TinsmithError]:
        ended: dict[str, TrainResult | TinsmithError] = {}
        sequences = tokens = 0
        for part in ranges:
            batch = self._operations.get(part.operation_id)
            if batch is not None:
                datums = batch.datums[part.start : part.stop]
                sequences, tokens = sequences + len(datums), tokens + sum(len(datum.tokens) for datum in datums)
                if part.start <= batch.loss_config.get("fail_at", -1.0) < part.stop:
                    self.drop_operation(part.operation_id)
                    ended[part.operation_id] = InvalidRequest("a datum is bad", field="data")
                    continue
            ended.update(super().compute([part]))
        self.computed = PassStats(tokens, tokens, sequences, 1, 1000.0 * tokens, {"base": 0.5, "lora": 0.25})
        return ended

    def take_stats(self) -> PassStats:
        taken, self.computed = self.computed, PassStats()
        return taken

    def optimizer_step(
        self, adapter_id: str, params: StepParams | None = None, *, grad_clip_norm: float = 0.0
    ) -> StepResult:
        adapter = self.adapter(adapter_id)
        gradient = adapter.gradient + (adapter.stage or 0.0)
        self.optimizer_zero_grad(adapter_id)
        if not np.isfinite(gradient):
            raise NonFiniteGradient("the gradient is not finite")
        lr = params.lr if params is not None and params.lr is not None else 1.0
        adapter.weight -= lr * gradient
        adapter.steps += 1
        return StepResult({"grad_norm:mean": abs(gradient), "learning_rate:mean": lr})

    def optimizer_zero_grad(self, adapter_id: str) -> None:
        adapter = self.adapter(adapter_id)
        adapter.gradient = 0.0
        if adapter.stage is not None:
            adapter.stage = 0.0

    def _misbehave(self, batch: TrainBatch) -> None:
        time.sleep(batch.loss_config.get("sleep", 0.0))
        if batch.loss_config.get("raise"):
            raise ValueError("secret detail /etc/passwd")
        if batch.loss_config.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class ToyRequest:
    sample: Sample
    done: int = 0


class ToySampler(SamplingEngine):
    """A batch of up to `max_rows` rows in which every step takes `step_seconds`; the next request waits for room."""

    def __init__(self, step_seconds: float = 0.0, max_rows: int = 64) -> None:
        self.step_seconds = step_seconds
        self.max_rows = max_rows
        self.waiting: dict[str, ToyRequest] = {}
        self.running: dict[str, ToyRequest] = {}
        self.taken: dict[str, tuple[int | None, str]] = {}
        """Seed and cache domain of all that was ever added, for tests."""
        self.most_rows = 0
        self.done = SampleStats()

    @classmethod
    def check(cls) -> None:
        return None

    def add(self, request_id: str, sample: Sample) -> None:
        if sample.prompt[0] == REFUSE_PROMPT:
            raise InvalidRequest("the toy refuses this prompt", field="prompt")
        self.taken[request_id] = (sample.params.seed, sample.cache_domain)
        self.waiting[request_id] = ToyRequest(sample)

    def cancel(self, request_id: str) -> Cancelled | None:
        if self.waiting.pop(request_id, None) is not None:
            return Cancelled()
        request = self.running.pop(request_id, None)
        if request is None:
            return None
        prompt, rows = len(request.sample.prompt), request.sample.num_samples
        return Cancelled(prompt_tokens=prompt, drawn_tokens=rows * request.done)

    @property
    def load(self) -> SamplerLoad:
        active = len(self.waiting) + len(self.running)
        return SamplerLoad(active, len(self.waiting), self._rows(), self.max_rows)

    def take_stats(self) -> SampleStats:
        taken, self.done = self.done, SampleStats()
        return taken

    def step(self) -> SampleStep:
        time.sleep(self.step_seconds)
        step = SampleStep()
        prompts = self._admit()
        drawn = self._rows()
        for request_id, request in list(self.running.items()):
            sample = request.sample
            if sample.prompt[0] == KILL_PROMPT:
                os.kill(os.getpid(), signal.SIGKILL)
            if sample.prompt[0] == RAISE_PROMPT:
                raise ValueError("a whole turn fails")
            if sample.adapter_folder is not None and not Path(sample.adapter_folder).exists():
                step.ended[request_id] = NotFound("the checkpoint of the sampler does not exist")
                del self.running[request_id]
                continue
            if sample.stream:
                step.deltas[request_id] = [self._delta(sample, row, request.done) for row in range(sample.num_samples)]
            request.done += 1
            if request.done >= self._length(sample):
                step.ended[request_id] = self._result(sample)
                del self.running[request_id]
        self.done = SampleStats(
            self.done.prompt_tokens + prompts,
            0,
            self.done.drawn_tokens + drawn,
            self.done.steps + 1,
            self.done.seconds + self.step_seconds,
        )
        return step

    def _admit(self) -> int:
        """Give waiting requests rows, in order; returns the tokens of their prompts."""
        prompts = 0
        while self.waiting:
            request_id, request = next(iter(self.waiting.items()))
            if self.running and self._rows() + request.sample.num_samples > self.max_rows:
                break
            del self.waiting[request_id]
            self.running[request_id] = request
            prompts += len(request.sample.prompt)
        self.most_rows = max(self.most_rows, self._rows())
        return prompts

    def _rows(self) -> int:
        return sum(request.sample.num_samples for request in self.running.values())

    @staticmethod
    def _length(sample: Sample) -> int:
        return sample.params.max_tokens or 16

    def _delta(self, sample: Sample, row: int, place: int) -> SampleDelta:
        tokens = self._tokens(sample, row)[place : place + 1]
        topk = None
        if sample.topk_sample_logprobs:
            ids = (tokens[:, None] + np.arange(sample.topk_sample_logprobs)).astype(np.int32)
            topk = TopK(ids, np.zeros(ids.shape, np.float32))
        return SampleDelta(row, tokens, np.zeros(1, np.float32), topk)

    def _tokens(self, sample: Sample, row: int) -> NDArray[np.int32]:
        shift = 0.0
        if sample.adapter_folder is not None:
            shift = json.loads((Path(sample.adapter_folder) / "toy.json").read_text())["weight"]
        first = int(sample.prompt[-1] + shift) + row
        return ((first + np.arange(self._length(sample))) % 100).astype(np.int32)

    def _result(self, sample: Sample) -> SampleResult:
        return SampleResult(
            tuple(
                SampledSequence(tokens, np.zeros(len(tokens), np.float32), "length")
                for tokens in (self._tokens(sample, row) for row in range(sample.num_samples))
            )
        )


def build(spec: WorkerSpec, progress: Progress) -> TinkerActorRolloutRefWorker:
    """The builder for `WorkerSpec.builder`; the model names "broken", "slow" and "dies" misbehave at start."""
    progress("loading the toy")
    if spec.model == "slow":
        time.sleep(60)
    if spec.model == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    engine = ToyEngine(spec.model)
    return TinkerActorRolloutRefWorker(engine, ToySampler(), engine.load())
