"""The contract of a training engine as a reusable class: subclass it, provide `engine`, and every test runs on it.

It speaks through the public interface only. Engines whose arithmetic depends on the batch (other kernels for other
shapes) set `exact = False`, and equalities become closeness.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from engines.base import BaseEngine
from schemas.errors import AlreadyExists, EngineFailure, InvalidRequest, ModelLost, NonFiniteGradient, NotFound, NotNow
from schemas.losses import LOSSES
from schemas.operations import Datum, LoraSpec, OptimStepParams, StepResult, TrainBatch, TrainResult
from tests.engines.batches import VOCAB, make_batch, make_datum

SPEC = LoraSpec(rank=4, seed=11)
FAST = OptimStepParams(lr=1e-2, eps=1e-8)


def accumulate(engine: BaseEngine, batch: TrainBatch) -> TrainResult:
    """A split `forward_backward`: the gradient stays."""
    with engine.train_mode(batch.adapter_id, zero_grad_on_exit=False):
        return engine.forward_backward(batch)


def train(engine: BaseEngine, batch: TrainBatch, params: OptimStepParams = FAST) -> StepResult:
    """One forward_backward and one step."""
    accumulate(engine, batch)
    return engine.optimizer_step(batch.adapter_id, params)


def logprobs(engine: BaseEngine, adapter_id: str) -> np.ndarray:
    """A fingerprint of the adapter's weights: the logprobs of a fixed batch."""
    return np.concatenate([lp.ravel() for lp in engine.forward(make_batch(adapter_id, seed=99)).logprobs])


class EngineContract:
    """All tests take `engine`: a loaded engine with a vocabulary of 259 and a context of 256, without adapters."""

    exact: ClassVar[bool] = True

    @pytest.fixture
    def engine(self) -> BaseEngine:
        raise NotImplementedError("provide a loaded engine")

    def same(self, one: np.ndarray | float, other: np.ndarray | float) -> None:
        if self.exact:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

    # -- results -------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("loss", sorted(LOSSES))
    def test_every_loss_gives_logprobs_of_every_datum(self, engine: BaseEngine, loss: str) -> None:
        engine.create_adapter("a", SPEC)
        batch = make_batch("a", loss)
        forward, backward = engine.forward(batch), accumulate(engine, batch)
        for result in (forward, backward):
            assert [lp.shape for lp in result.logprobs] == [d.tokens.shape for d in batch.datums]
            assert all(lp.dtype == np.float32 and np.isfinite(lp).all() for lp in result.logprobs)
            assert all(name.count(":") == 1 for name in result.metrics)
            assert "loss:sum" in result.metrics
        for one, other in zip(forward.logprobs, backward.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)

    def test_a_datum_never_depends_on_its_neighbours(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        batch = make_batch("a", lengths=(6, 17, 3))
        together = engine.forward(batch).logprobs
        for datum, lp in zip(batch.datums, together, strict=True):
            self.same(engine.forward(TrainBatch("a", (datum,), batch.loss_fn)).logprobs[0], lp)

    def test_two_dimensional_targets(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        rng = np.random.default_rng(1)
        flat = make_datum("cross_entropy", 8, rng)
        columns = rng.integers(0, VOCAB, (8, 3))
        columns[:, 1] = flat.inputs["target_tokens"]
        weights = np.zeros((8, 3), np.float32)
        weights[:, 1] = flat.inputs["weights"]
        wide = Datum(flat.tokens, {"target_tokens": columns, "weights": weights})
        one = accumulate(engine, TrainBatch("a", (flat,), "cross_entropy"))
        narrow_norm = engine.optimizer_step("a", OptimStepParams(lr=0.0)).metrics["grad_norm"]
        two = accumulate(engine, TrainBatch("a", (wide,), "cross_entropy"))
        wide_norm = engine.optimizer_step("a", OptimStepParams(lr=0.0)).metrics["grad_norm"]
        assert two.logprobs[0].shape == (8, 3)
        np.testing.assert_allclose(two.logprobs[0][:, 1], one.logprobs[0], atol=1e-6)
        assert two.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-5)
        assert wide_norm == pytest.approx(narrow_norm, rel=1e-5)

    def test_an_adapter_starts_as_the_base_model_and_learns(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        engine.create_adapter("b", LoraSpec(rank=2, seed=5))
        self.same(logprobs(engine, "a"), logprobs(engine, "b"))
        batch = TrainBatch("a", (Datum(np.arange(3, 23), {"target_tokens": np.arange(4, 24)}),), "cross_entropy")
        losses = [accumulate(engine, batch).metrics["loss:sum"]]
        for _ in range(10):
            engine.optimizer_step("a", FAST)
            losses.append(accumulate(engine, batch).metrics["loss:sum"])
        assert losses[-1] < 0.7 * losses[0]

    # -- snapshots -----------------------------------------------------------------------------------------------
    def test_a_snapshot_is_of_the_moment_it_was_asked_for(self, engine: BaseEngine, tmp_path: Path) -> None:
        """And an adapter that is restored from it goes on to the same bits, a pending gradient included."""
        engine.create_adapter("a", SPEC)
        batch = make_batch("a")
        for _ in range(2):
            accumulate(engine, batch)
            engine.optimizer_step("a", FAST)
        accumulate(engine, batch)
        write = engine.snapshot_adapter("a", tmp_path / "snapshot")
        engine.optimizer_step("a", FAST)
        expected = logprobs(engine, "a")
        accumulate(engine, batch)
        saved = write()
        assert saved.size_bytes == (tmp_path / "snapshot").stat().st_size
        with pytest.raises(AlreadyExists):
            engine.restore_adapter("a", tmp_path / "snapshot", saved.sha256)
        engine.remove_adapter("a")
        engine.restore_adapter("a", tmp_path / "snapshot", saved.sha256)
        engine.optimizer_step("a", FAST)
        np.testing.assert_array_equal(logprobs(engine, "a"), expected)

    def test_a_damaged_or_missing_snapshot_restores_nothing(self, engine: BaseEngine, tmp_path: Path) -> None:
        engine.create_adapter("a", SPEC)
        saved = engine.snapshot_adapter("a", tmp_path / "snapshot")()
        damaged = bytearray((tmp_path / "snapshot").read_bytes())
        damaged[len(damaged) // 2] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        for name in ("damaged", "missing"):
            with pytest.raises(ModelLost):
                engine.restore_adapter("b", tmp_path / name, saved.sha256)
            with pytest.raises(NotFound):
                engine.forward(make_batch("b"))

    def test_a_snapshot_that_cannot_be_read_now_is_not_taken_for_damaged(
        self, engine: BaseEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.create_adapter("a", SPEC)
        saved = engine.snapshot_adapter("a", tmp_path / "snapshot")()
        opened = Path.open

        def out_of_descriptors(path: Path, *args: Any, **options: Any) -> Any:
            if path.name == "snapshot":
                raise OSError(errno.EMFILE, "Too many open files")
            return opened(path, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", out_of_descriptors)
            with pytest.raises(NotNow, match="Too many open files"):
                engine.restore_adapter("b", tmp_path / "snapshot", saved.sha256)
        engine.restore_adapter("b", tmp_path / "snapshot", saved.sha256)

    # -- gradients -----------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("loss", sorted(LOSSES))
    def test_chunks_equal_one_batch(self, engine: BaseEngine, loss: str) -> None:
        batch = make_batch("", loss)
        results: list[tuple[float, np.ndarray]] = []
        for name, chunks in (("whole", [batch.datums]), ("chunks", [batch.datums[:1], batch.datums[1:]])):
            engine.create_adapter(name, SPEC)
            for datums in chunks:
                accumulate(engine, TrainBatch(name, datums, loss))
            norm = engine.optimizer_step(name, FAST).metrics["grad_norm"]
            results.append((norm, logprobs(engine, name)))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
        np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-3)

    def test_scaling_the_weights_scales_the_gradient(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        norms = []
        for factor in (1.0, 4.0):
            datum = make_batch("a").datums[0]
            inputs = {**datum.inputs, "weights": (datum.inputs["weights"] * factor).astype(np.float32)}
            accumulate(engine, TrainBatch("a", (Datum(datum.tokens, inputs),), "cross_entropy"))
            norms.append(engine.optimizer_step("a", OptimStepParams(lr=0.0)).metrics["grad_norm"])
        assert norms[1] == pytest.approx(4 * norms[0], rel=1e-5)

    def test_forward_and_zero_grad_leave_no_gradient(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        with engine.eval_mode():
            engine.forward(make_batch("a"))
        accumulate(engine, make_batch("a"))
        engine.optimizer_zero_grad("a")
        metrics = engine.optimizer_step("a", FAST).metrics
        assert metrics["grad_norm"] == 0.0
        assert metrics["update_norm"] == 0.0

    def grad_norm(self, engine: BaseEngine, adapter_id: str = "a") -> float:
        """The norm of what is accumulated (and clears it)."""
        return engine.optimizer_step(adapter_id, OptimStepParams(lr=0.0)).metrics["grad_norm"]

    @pytest.mark.parametrize("zero", [False, True])
    @pytest.mark.parametrize("fails", [False, True])
    def test_contexts_keep_or_clear(self, engine: BaseEngine, zero: bool, fails: bool) -> None:
        engine.create_adapter("a", SPEC)
        batch = make_batch("a")
        accumulate(engine, batch)
        one = self.grad_norm(engine)
        accumulate(engine, batch)
        try:
            with engine.train_mode("a", zero_grad_on_exit=zero):
                engine.forward_backward(batch)
                if fails:
                    raise KeyError("from the caller")
        except KeyError:
            assert fails
        kept = 0 if zero else (1 if fails else 2)
        assert self.grad_norm(engine) == pytest.approx(kept * one, rel=1e-5)

    def test_the_default_context_clears_and_a_step_inside_sees_the_stage(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        batch = make_batch("a")
        accumulate(engine, batch)
        with engine.train_mode("a"):
            engine.forward_backward(batch)
            inside = self.grad_norm(engine)
            assert self.grad_norm(engine) == 0.0
            engine.forward_backward(batch)
        assert self.grad_norm(engine) == 0.0
        accumulate(engine, batch)
        assert inside == pytest.approx(2 * self.grad_norm(engine), rel=1e-5)

    def test_forward_backward_needs_the_context_of_its_adapter(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        engine.create_adapter("b", SPEC)
        with pytest.raises(EngineFailure):
            engine.forward_backward(make_batch("a"))
        with engine.train_mode("a"), pytest.raises(EngineFailure):
            engine.forward_backward(make_batch("b"))

    # -- refusals ------------------------------------------------------------------------------------------------
    def bad_batches(self) -> Sequence[tuple[str, TrainBatch]]:
        """(field that the error must name, batch)."""
        good = make_batch("a", "ppo")
        ce = make_batch("a")

        def changed(index: int, loss: str = "ppo", **inputs: Any) -> TrainBatch:
            datums = list((good if loss == "ppo" else ce).datums)
            merged = {k: v for k, v in {**datums[index].inputs, **inputs}.items() if v is not None}
            datums[index] = Datum(datums[index].tokens, merged)
            return TrainBatch("a", tuple(datums), loss)

        def tokens(values: Any) -> TrainBatch:
            inputs = {"target_tokens": np.ones(len(values), np.int64)}
            return TrainBatch("a", (ce.datums[0], Datum(np.asarray(values), inputs)), "cross_entropy")

        n = len(good.datums[1].tokens)
        where = "data[1].loss_fn_inputs"
        nan = np.full(n, np.nan, np.float32)
        return [
            ("data", TrainBatch("a", (), "cross_entropy")),
            ("loss_fn", TrainBatch("a", ce.datums, "foo")),
            ("loss_fn_config", TrainBatch("a", good.datums, "ppo", {"epsilon": 0.1})),
            ("loss_fn_config.clip_low_threshold", TrainBatch("a", good.datums, "ppo", {"clip_low_threshold": np.nan})),
            ("loss_fn_config.clip_low_threshold", TrainBatch("a", good.datums, "ppo", {"clip_low_threshold": 2.0})),
            ("data[1].model_input", tokens(np.array([], np.int64))),
            ("data[1].model_input", tokens([1, -1])),
            ("data[1].model_input", tokens([1, VOCAB])),
            ("data[1].model_input", tokens([1.5, 2.0])),
            ("data[1].model_input", tokens(np.ones(257, np.int64))),
            (f"{where}.target_tokens", changed(1, target_tokens=np.full(n, VOCAB))),
            (f"{where}.target_tokens", changed(1, target_tokens=np.full(n, -100))),
            (f"{where}.target_tokens", changed(1, target_tokens=np.ones(n - 1, np.int64))),
            (f"{where}.target_tokens", changed(1, target_tokens=np.ones((n, 2), np.int64))),
            (f"{where}.weights", changed(1, "cross_entropy", weights=nan)),
            (f"{where}.weights", changed(1, "cross_entropy", weights=np.ones(n + 1, np.float32))),
            (f"{where}.weights", changed(1, weights=np.ones(n, np.float32))),
            (f"{where}.advantages", changed(1, advantages=None)),
            (f"{where}.advantages", changed(1, advantages=np.full(n, np.inf, np.float32))),
            (f"{where}.logprobs", changed(1, logprobs=nan)),
            (f"{where}.clip_low_threshold", changed(1, clip_low_threshold=np.full(n, -0.2, np.float32))),
            (f"{where}.clip_low_threshold", changed(1, clip_low_threshold=np.full(n, 1.3, np.float32))),
        ]

    def test_bad_batches_are_refused_by_name_and_change_nothing(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        engine.create_adapter("twin", SPEC)
        for adapter_id in ("a", "twin"):
            train(engine, make_batch(adapter_id))
            accumulate(engine, make_batch(adapter_id, seed=5))
        for field, batch in self.bad_batches():
            with pytest.raises(InvalidRequest) as caught:
                accumulate(engine, batch)
            assert caught.value.field == field, caught.value.message
            with pytest.raises(InvalidRequest):
                engine.forward(batch)
        steps = [engine.optimizer_step(adapter_id, FAST).metrics for adapter_id in ("a", "twin")]
        self.same(steps[0]["grad_norm"], steps[1]["grad_norm"])
        self.same(logprobs(engine, "a"), logprobs(engine, "twin"))

    def test_unknown_adapters(self, engine: BaseEngine, tmp_path: Path) -> None:
        calls = [
            lambda: engine.forward(make_batch("no")),
            lambda: accumulate(engine, make_batch("no")),
            lambda: engine.optimizer_step("no"),
            lambda: engine.optimizer_zero_grad("no"),
            lambda: engine.save_adapter("no", tmp_path / "x", with_optimizer=True),
        ]
        for call in calls:
            with pytest.raises(NotFound):
                call()
        engine.remove_adapter("no")
        engine.create_adapter("a", SPEC)
        with pytest.raises(AlreadyExists):
            engine.create_adapter("a", SPEC)
        with pytest.raises(InvalidRequest):
            engine.create_adapter("b", LoraSpec(4, 0, False, False, False))

    # -- steps ---------------------------------------------------------------------------------------------------
    def test_every_adam_field_is_honoured_for_its_step_only(self, engine: BaseEngine) -> None:
        base: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        changes: list[dict[str, Any]] = [
            {},
            {"lr": 2e-2},
            {"betas": (0.5, 0.95)},
            {"betas": (0.9, 0.5)},
            {"eps": 1.0},
            {"weight_decay": 1.0},
            {"clip": 1e-3, "eps": 1e-3},
            {"clip": 0.0, "eps": 1e-3},
        ]
        prints = []
        for index, change in enumerate(changes):
            name = f"a{index}"
            engine.create_adapter(name, SPEC)
            clip = change.pop("clip", 0.0)
            for seed in (1, 2, 3):
                accumulate(engine, make_batch(name, seed=seed))
                metrics = engine.optimizer_step(
                    name, OptimStepParams(**{**base, **change}), grad_clip_norm=clip
                ).metrics
                assert metrics["learning_rate"] == {**base, **change}["lr"]
            prints.append(logprobs(engine, name))
        for i, one in enumerate(prints):
            for other in prints[i + 1 :]:
                assert np.abs(one - other).max() > 1e-4

    def test_lr_zero_moves_nothing_and_bad_params_change_nothing(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        before = logprobs(engine, "a")
        accumulate(engine, make_batch("a", seed=1))
        for params in (OptimStepParams(lr=-1.0), OptimStepParams(betas=(1.0, 0.9)), OptimStepParams(eps=float("nan"))):
            with pytest.raises(InvalidRequest):
                engine.optimizer_step("a", params)
        for clip in (-1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidRequest):
                engine.optimizer_step("a", FAST, grad_clip_norm=clip)
        metrics = engine.optimizer_step("a", OptimStepParams(lr=0.0)).metrics
        assert metrics["grad_norm"] > 0
        assert metrics["update_norm"] == 0.0
        self.same(logprobs(engine, "a"), before)

    def test_a_step_without_gradient_decays_the_moments(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        first = engine.optimizer_step("a", FAST).metrics
        second = engine.optimizer_step("a", FAST).metrics
        assert first["grad_norm"] == second["grad_norm"] == 0.0
        assert first["update_norm"] > second["update_norm"] > 0

    def test_a_gradient_that_is_not_finite_fails_the_step_and_names_its_origin(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        before = logprobs(engine, "a")
        accumulate(engine, make_batch("a"))
        good = make_batch("a", "importance_sampling", lengths=(5, 6))
        bad = dict(good.datums[1].inputs, logprobs=np.full(6, -1e4, np.float32), advantages=np.ones(6, np.float32))
        accumulate(engine, TrainBatch("a", (good.datums[0], Datum(good.datums[1].tokens, bad)), good.loss_fn))
        with pytest.raises(NonFiniteGradient, match=r"data\[1\] of forward_backward 2 of 2"):
            engine.optimizer_step("a", FAST)
        self.same(logprobs(engine, "a"), before)
        assert self.grad_norm(engine) == 0.0
        assert train(engine, make_batch("a")).metrics["update_norm"] > 0

    def test_a_step_to_infinity_is_refused(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        engine.create_adapter("twin", SPEC)
        for name in ("a", "twin"):
            train(engine, make_batch(name))
            accumulate(engine, make_batch(name))
        for extreme in ({"lr": 1e300}, {"lr": 3e38}, {"lr": 1e38, "weight_decay": 1e38}, {"eps": 1e-60}):
            with pytest.raises(InvalidRequest):
                engine.optimizer_step("a", OptimStepParams(**extreme))
        engine.optimizer_step("a", FAST)
        engine.optimizer_step("twin", FAST)
        self.same(logprobs(engine, "a"), logprobs(engine, "twin"))

    def test_a_diverged_adapter_says_so_and_harms_nobody_else(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        engine.create_adapter("b", SPEC)
        before = logprobs(engine, "b")
        for _ in range(2):
            accumulate(engine, make_batch("b"))
        train(engine, make_batch("a"))
        train(engine, make_batch("a"), OptimStepParams(lr=1e30))
        for call in (lambda: engine.forward(make_batch("a")), lambda: accumulate(engine, make_batch("a"))):
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.code == "diverged"
        self.same(logprobs(engine, "b"), before)

    # -- isolation and checkpoints ---------------------------------------------------------------------------------
    def test_interleaved_adapters_equal_each_alone(self, engine: BaseEngine) -> None:
        specs = {"a": SPEC, "b": LoraSpec(rank=8, seed=3, train_mlp=False)}
        alone = {}
        for name, spec in specs.items():
            engine.create_adapter(f"{name}-alone", spec)
            for seed in (1, 2, 3):
                train(engine, make_batch(f"{name}-alone", seed=seed), OptimStepParams(lr=1e-2, weight_decay=0.1))
            alone[name] = logprobs(engine, f"{name}-alone")
        for name, spec in specs.items():
            engine.create_adapter(name, spec)
        for seed in (1, 2, 3):
            for name in specs:
                accumulate(engine, make_batch(name, seed=seed))
            with pytest.raises(InvalidRequest):
                accumulate(engine, TrainBatch("b", (), "cross_entropy"))
            for name in specs:
                engine.optimizer_step(name, OptimStepParams(lr=1e-2, weight_decay=0.1))
        for name in specs:
            self.same(logprobs(engine, name), alone[name])

    def test_a_removed_adapter_leaves_nothing_to_its_successor(self, engine: BaseEngine) -> None:
        engine.create_adapter("a", SPEC)
        fresh = logprobs(engine, "a")
        train(engine, make_batch("a"))
        accumulate(engine, make_batch("a"))
        engine.remove_adapter("a")
        engine.create_adapter("a", SPEC)
        self.same(logprobs(engine, "a"), fresh)
        assert self.grad_norm(engine) == 0.0

    def test_branches_after_a_save(self, engine: BaseEngine, tmp_path: Path) -> None:
        engine.create_adapter("live", SPEC)
        for seed in (1, 2, 3):
            train(engine, make_batch("live", seed=seed))
        saved = engine.save_adapter("live", tmp_path / "c", with_optimizer=True)
        assert saved.lora == SPEC
        assert saved.size_bytes > 0
        at_save = logprobs(engine, "live")
        loaded = engine.load_adapter("full", tmp_path / "c", with_optimizer=True, create=True)
        assert loaded == saved
        engine.load_adapter("weights", tmp_path / "c", with_optimizer=False, create=True)
        engine.create_adapter("into", LoraSpec(rank=4, seed=999))
        train(engine, make_batch("into"))
        accumulate(engine, make_batch("into"))
        engine.load_adapter("into", tmp_path / "c", with_optimizer=True, create=False)
        names = ("live", "full", "into", "weights")
        for name in names:
            self.same(logprobs(engine, name), at_save)
        for seed in (4, 5):
            for name in names:
                accumulate(engine, make_batch(name, seed=seed))
                engine.optimizer_step(name, FAST, grad_clip_norm=5.0)
        after = {name: logprobs(engine, name) for name in names}
        self.same(after["full"], after["live"])
        self.same(after["into"], after["live"])
        assert np.abs(after["weights"] - after["live"]).max() > 1e-3

    def test_loads_that_must_fail_leave_the_live_adapter(self, engine: BaseEngine, tmp_path: Path) -> None:
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        engine.save_adapter("a", tmp_path / "sampler", with_optimizer=False)
        engine.create_adapter("other", LoraSpec(rank=8, seed=1))
        engine.save_adapter("other", tmp_path / "rank8", with_optimizer=True)
        engine.create_adapter("part", LoraSpec(rank=4, seed=1, train_mlp=False))
        engine.save_adapter("part", tmp_path / "part", with_optimizer=True)
        before = logprobs(engine, "a")
        accumulate(engine, make_batch("a"))
        attempts = [("sampler", True), ("rank8", False), ("part", True), ("missing", False)]
        for folder, with_optimizer in attempts:
            with pytest.raises(InvalidRequest):
                engine.load_adapter("a", tmp_path / folder, with_optimizer=with_optimizer, create=False)
            with pytest.raises(AlreadyExists):
                engine.load_adapter("a", tmp_path / folder, with_optimizer=with_optimizer, create=True)
        with pytest.raises(AlreadyExists):
            engine.save_adapter("a", tmp_path / "sampler", with_optimizer=True)
        self.same(logprobs(engine, "a"), before)
        assert self.grad_norm(engine) > 0
