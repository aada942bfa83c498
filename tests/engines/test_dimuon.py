"""The properties that docs/optimizers.md states of Dimuon, and its life in the engine: steps, checkpoints, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.dimuon import DEFAULTS, dimuon_step, direction, matrix_sign, rank_correction
from engines.lora import Pairs
from engines.torch_engine.engine import TorchEngine
from schemas.errors import InvalidRequest
from schemas.operations import DimuonStepParams, LoraSpec, OptimStepParams
from tests.engines.batches import make_batch

SPEC = LoraSpec(rank=4, seed=3)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different size."""
    rows, columns = random(shape[0], 1, seed=seed + 1), random(1, shape[1], seed=seed + 2)
    return random(*shape, seed=seed) * torch.exp(2 * rows) * torch.exp(2 * columns)


@pytest.fixture(scope="module")
def engine(tied_folder: Path) -> TorchEngine:
    engine = TorchEngine(tied_folder, dtype="float32", device="cpu", threads=1)
    engine.load()
    return engine


def train(engine: TorchEngine, adapter: str, params: DimuonStepParams | None = None, seed: int = 0) -> dict[str, float]:
    with engine.train_mode(adapter, zero_grad_on_exit=False):
        engine.forward_backward(make_batch(adapter, seed=seed))
    with engine.train_mode(adapter, zero_grad_on_exit=False):
        return dict(engine.optimizer_step(adapter, params or DimuonStepParams(lr=0.02)).metrics)


def weights(engine: TorchEngine, adapter: str) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in engine.adapter_weights(adapter).tensors]


# -- the direction -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(4, 48), (48, 4), (16, 24), (8, 200)])
@pytest.mark.parametrize("damping", [1e-8, 1e-4, 10.0])
def test_the_direction_has_singular_values_of_one_and_norm_sqrt_rank(shape: tuple[int, int], damping: float) -> None:
    found = direction(uneven(*shape), damping)
    torch.testing.assert_close(
        torch.linalg.svdvals(found), torch.ones(min(shape), dtype=torch.float64), rtol=0, atol=1e-5
    )
    assert math.isclose(float(torch.linalg.matrix_norm(found)), math.sqrt(min(shape)), rel_tol=1e-6)


def test_the_matrix_sign_is_the_one_of_the_singular_value_decomposition() -> None:
    x = random(6, 20).double()
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(matrix_sign(x), u @ vh)
    torch.testing.assert_close(matrix_sign(x.mT), (u @ vh).mT)


def test_a_momentum_of_lower_rank_moves_only_where_it_points() -> None:
    x = random(8, 2) @ random(2, 30, seed=1)
    found = direction(x, 1e4)
    assert math.isclose(float(torch.linalg.matrix_norm(found)), math.sqrt(2), rel_tol=1e-5)
    assert not direction(torch.zeros(3, 8, 5), 1e-4).any()


def test_the_direction_ignores_scale_and_follows_signs_and_order() -> None:
    x = uneven(6, 18)
    base = direction(x, 1e-4)
    for factor in (1e-25, 3.0, 1e15):
        torch.testing.assert_close(direction(x * factor, 1e-4), base, rtol=0, atol=1e-4)
    rows, columns = torch.randperm(6), torch.randperm(18)
    torch.testing.assert_close(direction(x[rows][:, columns], 1e-4), base[rows][:, columns])
    signs = torch.sign(random(6, 1)) * torch.sign(random(1, 18, seed=9))
    torch.testing.assert_close(direction(x * signs, 1e-4), base * signs.double())


def test_with_large_damping_the_direction_turns_with_the_momentum_and_with_small_it_does_not() -> None:
    x = uneven(6, 18).double()
    left, right = (torch.linalg.qr(random(n, n, seed=n).double())[0] for n in (6, 18))
    turned = left @ x @ right
    torch.testing.assert_close(direction(turned, 1e9), left @ direction(x, 1e9) @ right, rtol=0, atol=1e-5)
    assert (direction(turned, 1e-4) - left @ direction(x, 1e-4) @ right).abs().max() > 0.05


def test_damping_decides_how_far_columns_are_balanced() -> None:
    x = random(4, 30)
    x[:, 15:] *= 1e-2

    def quiet_share(damping: float) -> float:
        return float(direction(x, damping)[:, 15:].square().sum() / 4)

    shares = [quiet_share(damping) for damping in (1e-6, 1e-3, 1.0, 1e6)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 20 * shares[-1]
    assert math.isclose(shares[-1], float(matrix_sign(x.double())[:, 15:].square().sum() / 4), rel_tol=1e-3)


def test_the_direction_descends() -> None:
    for seed in range(50):
        x = uneven(5, 12, seed=3 * seed)
        assert float((x.double() * direction(x, 1e-4)).sum()) > 0.2 * float(torch.linalg.matrix_norm(x))


# -- the step ----------------------------------------------------------------------------------------------------------
SETTINGS = {**DEFAULTS, "lr": 0.1}


def matrices(rank: int) -> tuple[Pairs, Pairs]:
    """Weights of one module, and no momentum yet."""
    down, up = random(rank, 24), random(16, rank, seed=1)
    return {"proj": (down, up)}, {"proj": (torch.zeros_like(down), torch.zeros_like(up))}


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_a_step_is_the_learning_rate_times_the_direction_corrected_for_the_rank(rank: int) -> None:
    for exponent, factor in ((0.0, 1.0), (0.175, (rank / 32) ** 0.175), (1.0, rank / 32)):
        weights, momentum = matrices(rank)
        former = [tensor.clone() for tensor in weights["proj"]]
        gradient = {"proj": (uneven(rank, 24), uneven(16, rank))}
        dimuon_step(weights, momentum, gradient, **{**SETTINGS, "rank_lr_correction_exponent": exponent})
        for tensor, old in zip(weights["proj"], former, strict=True):
            moved = float(torch.linalg.matrix_norm(tensor - old))
            assert math.isclose(moved, 0.1 * factor * math.sqrt(rank), rel_tol=1e-4)
    assert rank_correction(32, 3.0) == 1.0


def test_the_momentum_is_the_running_average_of_gradients() -> None:
    weights, momentum = matrices(4)
    down, up = weights["proj"]
    expected, start = torch.zeros_like(down), down.clone()
    for seed in range(4):
        gradient = random(4, 24, seed=seed)
        expected = 0.75 * expected + 0.25 * gradient
        start = start - 0.1 * rank_correction(4, 0.175) * direction(expected, 1e-4).float()
        dimuon_step(weights, momentum, {"proj": (gradient, torch.zeros_like(up))}, **{**SETTINGS, "beta1": 0.75})
        torch.testing.assert_close(momentum["proj"][0], expected)
        torch.testing.assert_close(down, start)


def test_without_momentum_only_the_last_gradient_counts() -> None:
    weights, momentum = matrices(4)
    down, up = weights["proj"]
    for seed in range(3):
        former = down.clone()
        gradient = {"proj": (random(4, 24, seed=seed), torch.zeros_like(up))}
        dimuon_step(weights, momentum, gradient, **{**SETTINGS, "beta1": 0.0})
    expected = 0.1 * rank_correction(4, 0.175) * direction(random(4, 24, seed=2), 1e-4)
    torch.testing.assert_close(former - down, expected.float())


def test_pairs_of_two_ranks_are_refused() -> None:
    pairs = {"one": (random(4, 8), random(8, 4)), "two": (random(2, 8), random(8, 2))}
    with pytest.raises(ValueError, match="one rank"):
        dimuon_step(pairs, pairs, pairs, **SETTINGS)


# -- in the engine -----------------------------------------------------------------------------------------------------
def test_training_lowers_the_loss(engine: TorchEngine) -> None:
    engine.create_adapter("learn", SPEC, "dimuon")
    batch = make_batch("learn")
    batch = type(batch)(
        "learn",
        tuple(type(d)(d.tokens, {**d.inputs, "weights": np.ones(len(d.tokens), np.float32)}) for d in batch.datums),
        "cross_entropy",
    )
    losses = []
    for _ in range(8):
        with engine.train_mode("learn", zero_grad_on_exit=False):
            losses.append(engine.forward_backward(batch).metrics["loss:sum"])
            metrics = engine.optimizer_step("learn", DimuonStepParams(lr=0.05)).metrics
    assert losses[-1] < 0.8 * losses[0]
    assert metrics["learning_rate"] == 0.05
    assert min(metrics["grad_norm"], metrics["update_norm"]) > 0


def test_clipping_does_not_change_a_first_step_but_weighs_the_momentum(engine: TorchEngine) -> None:
    """The direction ignores scale, so clipping matters only relative to other gradients."""
    for name in ("free", "cut"):
        engine.create_adapter(name, SPEC, "dimuon")
    for name, clip in (("free", 0.0), ("cut", 1e-3)):
        with engine.train_mode(name, zero_grad_on_exit=False):
            engine.forward_backward(make_batch(name))
            engine.optimizer_step(name, DimuonStepParams(lr=0.02), grad_clip_norm=clip)
    for one, other in zip(weights(engine, "free"), weights(engine, "cut"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    for name in ("free", "cut"):
        train(engine, name, seed=1)
    gaps = [(a - b).abs().max() for a, b in zip(weights(engine, "free"), weights(engine, "cut"), strict=True)]
    assert max(gaps) > 1e-3


def test_a_checkpoint_keeps_the_type_and_the_momentum(engine: TorchEngine, tmp_path: Path) -> None:
    engine.create_adapter("live", SPEC, "dimuon")
    for seed in range(2):
        train(engine, "live", seed=seed)
    engine.save_adapter("live", tmp_path / "c", with_optimizer=True)
    assert json.loads((tmp_path / "c" / "tinsmith.json").read_text())["optimizer"] == "dimuon"
    engine.load_adapter("resumed", tmp_path / "c", with_optimizer=True, create=True)
    engine.load_adapter("fresh", tmp_path / "c", with_optimizer=False, create=True, optimizer="dimuon")
    engine.load_adapter("adam", tmp_path / "c", with_optimizer=False, create=True)
    for name in ("live", "resumed", "fresh"):
        train(engine, name, seed=2)
    live, resumed, fresh = (weights(engine, name) for name in ("live", "resumed", "fresh"))
    assert all(torch.equal(a, b) for a, b in zip(live, resumed, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(live, fresh, strict=True))
    assert engine.optimizer_step("adam", OptimStepParams(lr=0.0)).metrics


def test_state_of_another_optimizer_is_refused(engine: TorchEngine, tmp_path: Path) -> None:
    engine.create_adapter("one", SPEC, "dimuon")
    train(engine, "one")
    engine.save_adapter("one", tmp_path / "c", with_optimizer=True)
    engine.create_adapter("other", SPEC)
    with pytest.raises(InvalidRequest, match="dimuon"):
        engine.load_adapter("other", tmp_path / "c", with_optimizer=True, create=False)
    with pytest.raises(InvalidRequest, match="dimuon"):
        engine.load_adapter("new", tmp_path / "c", with_optimizer=True, create=True, optimizer="adamw")
    engine.load_adapter("other", tmp_path / "c", with_optimizer=False, create=False)
    assert engine.optimizer_step("other", OptimStepParams(lr=0.0)).metrics
    manifest = json.loads((tmp_path / "c" / "tinsmith.json").read_text())
    (tmp_path / "c" / "tinsmith.json").write_text(json.dumps({**manifest, "optimizer": "sgd"}))
    with pytest.raises(InvalidRequest, match="sgd"):
        engine.load_adapter("new", tmp_path / "c", with_optimizer=True, create=True)


def test_hyperparameters_of_the_other_optimizer_are_refused_and_nothing_changes(engine: TorchEngine) -> None:
    engine.create_adapter("mine", SPEC, "dimuon")
    train(engine, "mine")
    former = weights(engine, "mine")
    with pytest.raises(InvalidRequest) as caught:
        engine.optimizer_step("mine", OptimStepParams(lr=0.1))
    assert caught.value.field == "adam_params"
    for params in (
        DimuonStepParams(lr=-1.0),
        DimuonStepParams(beta1=1.0),
        DimuonStepParams(damping=0.0),
        DimuonStepParams(rank_lr_correction_exponent=math.nan),
    ):
        with pytest.raises(InvalidRequest) as caught:
            engine.optimizer_step("mine", params)
        assert (caught.value.field or "").startswith("optimizer_params.")
    assert all(torch.equal(a, b) for a, b in zip(former, weights(engine, "mine"), strict=True))
    engine.create_adapter("plain", SPEC)
    with pytest.raises(InvalidRequest) as caught:
        engine.optimizer_step("plain", DimuonStepParams(lr=0.1))
    assert caught.value.field == "optimizer_params"
