"""The engine against an independent float32 reference: transformers + PEFT (from our export) + torch.optim.AdamW.

The reference computes full logits and writes every loss down anew, in the plainest way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.lora import views
from engines.torch_engine.engine import TorchEngine
from schemas.losses import LOSSES
from schemas.operations import Datum, LoraSpec, OptimStepParams, TrainBatch
from tests.engines.batches import VOCAB, make_batch
from tests.engines.contract import accumulate, train

SPEC = LoraSpec(rank=4, seed=21)
ADAM: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Reference:
    """A PEFT model over the same base, from an exported folder, with an optimizer of its own."""

    def __init__(self, base: Path, export: Path) -> None:
        self.model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), export, is_trainable=True)
        self.model.eval()
        self.named = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(self.named.values(), foreach=False, **ADAM)

    def logprobs(self, datum: Datum) -> Tensor:
        logits = self.model(torch.tensor(datum.tokens)[None]).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])
        columns = targets if targets.dim() == 2 else targets[:, None]
        return torch.log_softmax(logits, -1).gather(1, columns).reshape(targets.shape)

    def loss(self, batch: TrainBatch) -> Tensor:
        config = {**LOSSES[batch.loss_fn].config, **batch.loss_config}
        return sum((naive_loss(batch.loss_fn, self.logprobs(d), d, config) for d in batch.datums), torch.zeros(()))

    def step(self, clip: float) -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(self.named.values(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def naive_loss(name: str, lp: Tensor, datum: Datum, config: dict[str, float]) -> Tensor:
    t = {k: torch.tensor(v) for k, v in datum.inputs.items()}
    if name == "cross_entropy":
        return -(t.get("weights", torch.ones_like(lp)) * lp).sum()
    q, a = t["logprobs"], t["advantages"]
    low = t.get("clip_low_threshold", config.get("clip_low_threshold"))
    high = t.get("clip_high_threshold", config.get("clip_high_threshold"))
    ratio = (lp - q).exp()
    if name == "gspo":
        mask = t["sequence_ratio_mask"]
        mean = ((lp - q) * mask).sum() / mask.sum()
        ratio = mean.exp().detach() * (lp - lp.detach()).exp()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "stable_reinforce":  # docs/losses.md; kl_coeff is 0 unless it is asked for
        return -(ratio.clamp(max=2.0).detach() * a * lp).sum()
    if name == "dro":
        return -(lp * a - config["beta"] / 2 * (lp - q) ** 2).sum()
    clipped = ratio.clamp(torch.as_tensor(low), torch.as_tensor(high))
    if name == "cispo":
        return -(clipped.detach() * lp * a).sum()
    return -torch.minimum(ratio * a, clipped * a).sum()


def export(engine: TorchEngine, adapter_id: str, folder: Path) -> Path:
    engine.save_adapter(adapter_id, folder, with_optimizer=False)
    return folder


def ours(engine: TorchEngine, adapter_id: str, what: str) -> dict[str, Tensor]:
    """Tensors ("weights" or "gradient") by PEFT's parameter names."""
    state = engine._pool.get(adapter_id)
    flat = state.flat if what == "weights" else state.gradient.flat
    assert flat is not None
    pairs = views(flat, state.weights.pairs)
    return {
        f"base_model.model.{m}.lora_{s}.weight": t for m, pair in pairs.items() for s, t in zip("AB", pair, strict=True)
    }


def realistic(engine: TorchEngine, loss: str, seed: int) -> TrainBatch:
    """Sampler logprobs near the trainer's (as in practice), so that ratios lie on both sides of the clip bounds."""
    batch = make_batch("a", loss, seed=seed, lengths=(9, 5, 14))
    if loss == "cross_entropy":
        return batch
    rng = np.random.default_rng(seed)
    datums = []
    for datum, lp in zip(batch.datums, engine.forward(batch).logprobs, strict=True):
        noisy = (lp + rng.normal(0, 0.3, lp.shape)).astype(np.float32)
        q = np.where(datum.inputs["logprobs"] != 0, noisy, 0).astype(np.float32)
        datums.append(Datum(datum.tokens, {**datum.inputs, "logprobs": q}))
    return TrainBatch("a", tuple(datums), loss)


def assert_gradients(engine: TorchEngine, reference: Reference) -> None:
    gradients = ours(engine, "a", "gradient")
    assert gradients.keys() == reference.named.keys()
    scale = max(float(p.grad.abs().max()) for p in reference.named.values() if p.grad is not None)
    for name, parameter in reference.named.items():
        assert parameter.grad is not None
        gap = float((gradients[name] - parameter.grad).abs().max())
        assert gap <= 1e-4 * max(float(parameter.grad.abs().max()), 1e-2 * scale), name


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("base", ["untied", "tied"])
def test_five_steps_of_every_loss(
    base: str, loss: str, chunked: bool, untied_folder: Path, tied_folder: Path, tmp_path: Path
) -> None:
    folder = untied_folder if base == "untied" else tied_folder
    engine = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    engine.create_adapter("a", SPEC)
    reference = Reference(folder, export(engine, "a", tmp_path / "init"))
    for seed in range(5):
        batch = realistic(engine, loss, seed)
        chunks = [(d,) for d in batch.datums] if chunked else [batch.datums]
        results = [accumulate(engine, TrainBatch("a", datums, loss)) for datums in chunks]
        value = reference.loss(batch)
        value.backward()
        logprobs = [lp for result in results for lp in result.logprobs]
        for datum, lp in zip(batch.datums, logprobs, strict=True):
            np.testing.assert_allclose(lp, reference.logprobs(datum).detach().numpy(), atol=2e-5, rtol=0)
        assert sum(r.metrics["loss:sum"] for r in results) == pytest.approx(value.item(), rel=1e-4, abs=1e-4)
        assert_gradients(engine, reference)
        norm = float(torch.stack([p.grad.norm() for p in reference.named.values() if p.grad is not None]).norm())
        clip = 0.0 if seed % 2 else norm / 2
        metrics = engine.optimizer_step("a", OptimStepParams(**ADAM), grad_clip_norm=clip).metrics
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        before = {name: p.detach().clone() for name, p in reference.named.items()}
        reference.step(clip)
        moved = torch.cat([(p.detach() - before[name]).ravel() for name, p in reference.named.items()])
        assert metrics["update_norm"] == pytest.approx(float(moved.norm()), rel=1e-3)
        assert float(moved.abs().max()) > 1e-4
    weights = ours(engine, "a", "weights")
    for name, parameter in reference.named.items():
        torch.testing.assert_close(
            weights[name], parameter.detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def engine(untied_folder: Path) -> TorchEngine:
    engine = TorchEngine(untied_folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    engine.create_adapter("a", SPEC)
    train(engine, make_batch("a"))
    return engine


@pytest.mark.parametrize("weighted", [False, True])
def test_two_dimensional_targets_with_weights_of_any_sign(
    engine: TorchEngine, untied_folder: Path, tmp_path: Path, weighted: bool
) -> None:
    reference = Reference(untied_folder, export(engine, "a", tmp_path / "c"))
    rng = np.random.default_rng(8)
    inputs: dict[str, Any] = {"target_tokens": rng.integers(0, VOCAB, (11, 4))}
    if weighted:
        weights = rng.normal(0, 2.0, (11, 4))
        weights[3] = 0.0
        inputs["weights"] = weights.astype(np.float32)
    batch = TrainBatch("a", (Datum(rng.integers(0, VOCAB, 11), inputs),), "cross_entropy")
    result = accumulate(engine, batch)
    value = reference.loss(batch)
    value.backward()
    expected = reference.logprobs(batch.datums[0]).detach().numpy()
    np.testing.assert_allclose(result.logprobs[0], expected, atol=2e-5, rtol=0)
    assert result.metrics["loss:sum"] == pytest.approx(value.item(), rel=1e-5)
    assert_gradients(engine, reference)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_clip_tensors_and_configuration(engine: TorchEngine, untied_folder: Path, tmp_path: Path, loss: str) -> None:
    reference = Reference(untied_folder, export(engine, "a", tmp_path / "c"))
    plain = realistic(engine, loss, 3)
    first = plain.datums[0]
    n = len(first.tokens)
    own = {
        "clip_low_threshold": np.linspace(0.5, 0.99, n).astype(np.float32),
        "clip_high_threshold": np.linspace(1.01, 1.4, n).astype(np.float32),
    }
    datums = (Datum(first.tokens, {**first.inputs, **own}), *plain.datums[1:])
    batch = TrainBatch("a", datums, loss, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05})
    result = accumulate(engine, batch)
    value = reference.loss(batch)
    value.backward()
    assert result.metrics["loss:sum"] == pytest.approx(value.item(), rel=1e-4)
    assert result.metrics["clip_fraction:mean"] > 0
    assert result.metrics["loss:sum"] != pytest.approx(engine.forward(plain).metrics["loss:sum"], rel=1e-4)
    assert_gradients(engine, reference)


@pytest.mark.parametrize(
    "flags", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("base", ["untied", "tied"])
def test_peft_loads_the_export_at_once(
    base: str, flags: tuple[bool, ...], untied_folder: Path, tied_folder: Path, tmp_path: Path
) -> None:
    folder = untied_folder if base == "untied" else tied_folder
    engine = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    engine.create_adapter("a", LoraSpec(8, 3, *flags))
    for seed in range(4):
        train(engine, make_batch("a", seed=seed), OptimStepParams(lr=2e-2))
    reference = Reference(folder, export(engine, "a", tmp_path / "c"))
    assert set(reference.named) == set(ours(engine, "a", "weights"))
    embedding = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert torch.equal(reference.model.get_input_embeddings().weight, embedding)
    batch = make_batch("a", seed=50)
    fresh = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
    fresh.load()
    fresh.create_adapter("a", LoraSpec(8, 3, *flags))
    for datum, lp, untrained in zip(
        batch.datums, engine.forward(batch).logprobs, fresh.forward(batch).logprobs, strict=True
    ):
        np.testing.assert_allclose(lp, reference.logprobs(datum).detach().numpy(), atol=1e-4, rtol=0)
        assert np.abs(lp - untrained).max() > 0.05


@pytest.mark.parametrize(
    "change",
    [{"lr": 1e-2}, {"betas": (0.5, 0.95)}, {"betas": (0.9, 0.5)}, {"eps": 1e-2}, {"weight_decay": 0.9}, {"clip": 1.0}],
    ids=lambda change: next(iter(change)),
)
def test_each_adam_field_acts_as_in_torch(
    engine: TorchEngine, untied_folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """From the engine's own gradients, so that only the optimizer is compared: torch's result to the last bits."""
    reference = Reference(untied_folder, export(engine, "a", tmp_path / "c"))
    engine.load_adapter("a", tmp_path / "c", with_optimizer=False, create=False)
    settings = {**ADAM, **change}
    clip = settings.pop("clip", 0.0)
    for seed, params in enumerate((ADAM, settings, ADAM)):
        accumulate(engine, make_batch("a", seed=seed))
        for name, gradient in ours(engine, "a", "gradient").items():
            reference.named[name].grad = gradient.clone()
        active = clip if seed == 1 else 0.0
        reference.optimizer.param_groups[0].update(params)
        reference.step(active)
        engine.optimizer_step("a", OptimStepParams(**params), grad_clip_norm=active)
    for name, tensor in ours(engine, "a", "weights").items():
        torch.testing.assert_close(tensor, reference.named[name].detach(), rtol=1e-6, atol=1e-8)
