"""The split primitives on the real torch engine and a tiny model: who has which methods, contexts, overrides, parts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.engine import TorchEngine
from schemas.errors import InvalidRequest, NotFound, TinsmithError
from schemas.operations import (
    Datum,
    LoraSpec,
    OptimStepParams,
    Sample,
    SampleTurn,
    SamplingParams,
    TrainBatch,
    TrainResult,
)
from tests.support.tiny_model import make_tiny_model
from workers.actor_rollout_ref import ActorRolloutRefWorker
from workers.dispatch import registered_methods
from workers.tinker import TinkerActorRolloutRefWorker, TinkerTrainingWorker
from workers.training import TrainingWorker

PRIMITIVES = {"optimizer_zero_grad", "forward_backward", "optimizer_step", "run_micro_batch"}
LORA = LoraSpec(rank=4, seed=1)
STEP = OptimStepParams(lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(folder, dtype="float32", device="cpu", threads=1)
    engine.load()
    yield engine
    assert torch.get_num_threads() == 1


@pytest.fixture
def worker(engine: TorchEngine) -> TinkerTrainingWorker:
    worker = TinkerTrainingWorker(engine)
    worker.create_adapter("a", LORA)
    return worker


def batch(seed: int = 0, adapter_id: str = "a", **inputs: Any) -> TrainBatch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 250, 12)
    values = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(12, np.float32)} | inputs
    return TrainBatch(adapter_id, (Datum(tokens, values),), "cross_entropy")


def logprobs(worker: TrainingWorker, adapter_id: str = "a", seed: int = 0) -> np.ndarray[Any, Any]:
    return worker.infer_batch(batch(seed, adapter_id)).logprobs[0]


def public_methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}


def test_the_tinker_worker_adds_exactly_the_primitives_and_their_turn() -> None:
    assert public_methods(TinkerTrainingWorker) - public_methods(TrainingWorker) == PRIMITIVES
    assert not PRIMITIVES & public_methods(TrainingWorker)
    assert set(vars(TinkerTrainingWorker)) - {"__module__", "__doc__"} == PRIMITIVES
    assert public_methods(TinkerActorRolloutRefWorker) - public_methods(ActorRolloutRefWorker) == PRIMITIVES
    assert not PRIMITIVES & public_methods(ActorRolloutRefWorker)


def test_everything_public_is_callable_over_a_group_and_nothing_else() -> None:
    for cls in (TrainingWorker, TinkerTrainingWorker, ActorRolloutRefWorker, TinkerActorRolloutRefWorker):
        assert set(registered_methods(cls)) == public_methods(cls)


def test_parts_come_from_the_class_attributes(engine: TorchEngine) -> None:
    class OtherRef(TrainingWorker):
        pass

    class Custom(TinkerActorRolloutRefWorker):
        ref_worker_cls = OtherRef

    rollout = TorchSampler(engine.model, engine.router, None)
    plain = ActorRolloutRefWorker(engine, rollout, engine.info)
    assert type(plain.actor) is TrainingWorker
    assert type(plain.ref) is TrainingWorker
    tinker = Custom(engine, rollout, engine.info)
    assert type(tinker.actor) is TinkerTrainingWorker
    assert type(tinker.ref) is OtherRef
    assert tinker.actor.engine is tinker.ref.engine is engine, "there is one copy of the base weights"


def test_the_primitives_of_the_combined_worker_go_through_its_actor(engine: TorchEngine) -> None:
    class Recording(TinkerTrainingWorker):
        def __init__(self, engine: TorchEngine) -> None:
            super().__init__(engine)
            self.seen: list[str] = []

        def forward_backward(self, batch: TrainBatch) -> TrainResult:
            self.seen.append("forward_backward")
            return super().forward_backward(batch)

        def optimizer_zero_grad(self, adapter_id: str) -> None:
            self.seen.append("optimizer_zero_grad")

    class Combined(TinkerActorRolloutRefWorker):
        actor_worker_cls = Recording

    worker = Combined(engine, TorchSampler(engine.model, engine.router, None), engine.info)
    worker.create_adapter("a", LORA)
    worker.forward_backward(batch())
    worker.optimizer_zero_grad("a")
    assert isinstance(worker.actor, Recording)
    assert worker.actor.seen == ["forward_backward", "optimizer_zero_grad"]
    assert worker.optimizer_step("a", STEP).metrics


def test_split_and_atomic_steps_are_the_same_step(engine: TorchEngine) -> None:
    split, atomic = TinkerTrainingWorker(engine), TrainingWorker(engine)
    split.create_adapter("a", LORA)
    atomic.create_adapter("b", LORA)
    for seed in range(3):
        one = split.forward_backward(batch(seed))
        stepped = split.optimizer_step("a", STEP, 0.5)
        other, atomically = atomic.train_batch(batch(seed, "b"), STEP, 0.5)
        np.testing.assert_array_equal(one.logprobs[0], other.logprobs[0])
        assert stepped.metrics == atomically.metrics
    np.testing.assert_array_equal(logprobs(split), logprobs(atomic, "b"))


def test_gradients_stay_between_calls_and_zero_grad_clears_them(worker: TinkerTrainingWorker) -> None:
    worker.forward_backward(batch(1))
    once = worker.optimizer_step("a", OptimStepParams(lr=0.0)).metrics
    worker.forward_backward(batch(1))
    worker.forward_backward(batch(1))
    twice = worker.optimizer_step("a", OptimStepParams(lr=0.0)).metrics
    assert grad_norm(twice) == pytest.approx(2 * grad_norm(once), rel=1e-5)
    worker.forward_backward(batch(1))
    worker.optimizer_zero_grad("a")
    assert grad_norm(worker.optimizer_step("a", OptimStepParams(lr=0.0)).metrics) == 0.0


def grad_norm(metrics: Any) -> float:
    [value] = [value for name, value in metrics.items() if name.partition(":")[0] == "grad_norm"]
    return float(value)


def test_a_failed_backward_keeps_what_earlier_calls_added(worker: TinkerTrainingWorker) -> None:
    worker.forward_backward(batch(1))
    with pytest.raises(TinsmithError):
        worker.forward_backward(batch(2, target_tokens=np.full(12, 10**6)))
    metrics = worker.optimizer_step("a", OptimStepParams(lr=0.0)).metrics
    worker.forward_backward(batch(1))
    assert grad_norm(worker.optimizer_step("a", OptimStepParams(lr=0.0)).metrics) == grad_norm(metrics) > 0


def test_an_exception_leaves_no_context_open(worker: TinkerTrainingWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: TrainBatch) -> TrainResult:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "forward_backward", broken)
        for call in (worker.forward_backward, worker.train_batch):
            with pytest.raises(ZeroDivisionError):
                call(batch())
    worker.forward_backward(batch())
    assert grad_norm(worker.optimizer_step("a", STEP).metrics) > 0


def test_a_failed_atomic_step_changes_nothing_and_clears_the_gradient(worker: TinkerTrainingWorker) -> None:
    before = logprobs(worker)
    worker.forward_backward(batch(1))
    with pytest.raises(TinsmithError):
        worker.train_batch(batch(2, target_tokens=np.full(12, 10**6)), STEP)
    with pytest.raises(InvalidRequest):
        worker.train_batch(batch(2), OptimStepParams(lr=float("nan")))
    np.testing.assert_array_equal(logprobs(worker), before)
    assert grad_norm(worker.optimizer_step("a", OptimStepParams(lr=0.0)).metrics) == 0.0


def test_train_batch_ignores_gradients_from_before(worker: TinkerTrainingWorker) -> None:
    worker.create_adapter("b", LORA)
    worker.forward_backward(batch(7))
    worker.train_batch(batch(1), STEP)
    worker.train_batch(batch(1, "b"), STEP)
    np.testing.assert_array_equal(logprobs(worker), logprobs(worker, "b"))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (OptimStepParams(lr=float("nan")), "learning_rate"),
        (OptimStepParams(lr=True), "learning_rate"),
        (OptimStepParams(lr="0.1"), "learning_rate"),  # type: ignore[arg-type]
        (OptimStepParams(eps=float("inf")), "eps"),
        (OptimStepParams(betas=(0.9,)), "betas"),  # type: ignore[arg-type]
        (OptimStepParams(betas=(0.9, float("nan"))), "beta2"),
        (OptimStepParams(betas=0.9), "betas"),  # type: ignore[arg-type]
        (OptimStepParams(lr=0.5, weight_decay="x"), "weight_decay"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_override_is_refused_before_anything_changes(
    worker: TinkerTrainingWorker, params: OptimStepParams, name: str
) -> None:
    before = logprobs(worker)
    worker.forward_backward(batch(1))
    with pytest.raises(InvalidRequest, match=name):
        worker.optimizer_step("a", params)
    np.testing.assert_array_equal(logprobs(worker), before)
    assert grad_norm(worker.optimizer_step("a", STEP).metrics) > 0, "the gradient must survive a refused override"


def test_harmless_widening_is_normalised(worker: TinkerTrainingWorker) -> None:
    worker.create_adapter("b", LORA)
    worker.train_batch(batch(1), OptimStepParams(lr=1, betas=[0, 0.95]))  # type: ignore[arg-type]
    worker.train_batch(batch(1, "b"), OptimStepParams(lr=1.0, betas=(0.0, 0.95)))
    np.testing.assert_array_equal(logprobs(worker), logprobs(worker, "b"))


def test_infer_touches_no_gradient_and_checkpoints_round_trip(worker: TinkerTrainingWorker, tmp_path: Path) -> None:
    worker.train_batch(batch(1), STEP)
    worker.infer_batch(batch(2))
    assert grad_norm(worker.optimizer_step("a", OptimStepParams(lr=0.0)).metrics) == 0.0
    saved = worker.save_checkpoint("a", str(tmp_path / "c"), True)
    assert saved.lora == LORA
    assert worker.load_checkpoint("b", str(tmp_path / "c"), True, True).lora == LORA
    np.testing.assert_array_equal(logprobs(worker), logprobs(worker, "b"))
    worker.remove_adapter("b")
    worker.remove_adapter("b")
    with pytest.raises(NotFound):
        logprobs(worker, "b")


def test_one_worker_trains_samples_and_scores_on_one_copy(engine: TorchEngine, folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    worker = TinkerActorRolloutRefWorker(engine, TorchSampler(engine.model, engine.router, tokenizer), engine.info)
    worker.create_adapter("a", LORA)
    base = worker.infer_batch(batch()).logprobs[0]
    np.testing.assert_array_equal(worker.ref_infer_batch(batch()).logprobs[0], base)
    for _ in range(3):
        worker.train_batch(batch(), STEP)
    assert np.abs(worker.infer_batch(batch()).logprobs[0] - base).max() > 1e-3
    np.testing.assert_array_equal(worker.ref_infer_batch(batch()).logprobs[0], base)
    worker.save_checkpoint("a", str(tmp_path / "c"), False)
    prompt = np.array([10, 20, 30], np.int64)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, stop=())
    added = {"base": Sample(prompt, greedy), "tuned": Sample(prompt, greedy, 1, str(tmp_path / "c"))}
    turn = worker.sample_turn(SampleTurn(added=added, steps=2))
    ended: dict[str, Any] = dict(turn.ended)
    assert turn.load.active == 2
    for _ in range(40):
        if len(ended) == 2:
            break
        ended.update(worker.sample_turn(SampleTurn(steps=2)).ended)
    for name, adapter_id in (("base", None), ("tuned", "a")):
        [sequence] = ended[name].sequences
        full = np.concatenate([prompt, sequence.tokens.astype(np.int64)])
        scored = Datum(full[:-1], {"target_tokens": full[1:], "weights": np.ones(len(full) - 1, np.float32)})
        score = worker.infer_batch if adapter_id else worker.ref_infer_batch
        result = score(TrainBatch("a", (scored,), "cross_entropy"))
        np.testing.assert_allclose(result.logprobs[0][len(prompt) - 1 :], sequence.logprobs, atol=1e-4)
    worker.sample_turn(SampleTurn(added={"gone": Sample(prompt, greedy)}, steps=1))
    assert worker.sample_turn(SampleTurn(cancelled=("gone", "unknown"))).load.active == 0
