"""The unmodified SDK's custom losses and other optimizer against a real server."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
import torch
import torch.nn.functional as F
from tinker import types
from torch import Tensor

from tests.e2e.conftest import MODEL

ADAM = types.AdamParams(learning_rate=1e-2)


def example(*tokens: int) -> types.Datum:
    """Each token predicts the next; the earlier tokens are a prompt."""
    n = len(tokens) - 1
    inputs: Any = {
        "target_tokens": torch.tensor(tokens[1:]),
        "weights": torch.linspace(0.5, 1.5, n),
        "old": torch.linspace(-6.0, -3.0, n),
        "advantages": torch.linspace(-1.0, 1.0, n),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


DATA = [example(5, 6, 7, 8), example(9, 10, 11), example(20, 21, 22, 23, 24)]


def policy(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A clipped objective with a penalty, written as users write it."""
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.5, 3.0)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    loss = loss + 0.1 * F.softplus(old - logprobs).mean() + (logprobs[1:] - logprobs[:-1]).pow(2).sum() / len(DATA)
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/clipped:sum": (ratio > 3.0).float().sum()}


def on_the_client(data: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The same loss for the two passes of the client."""
    terms = [
        policy(lp, *(datum.loss_fn_inputs[name].to_torch() for name in ("old", "advantages")))
        for datum, lp in zip(data, logprobs, strict=True)
    ]
    total = torch.stack([loss for loss, _ in terms]).sum()
    ratio = sum(float(m["custom/ratio:mean"]) for _, m in terms) / len(terms)
    return total, {
        "custom/ratio:mean": ratio,
        "custom/clipped:sum": sum(float(m["custom/clipped:sum"]) for _, m in terms),
    }


def logprobs_of(client: Any) -> list[float]:
    data = [
        types.Datum(
            model_input=d.model_input, loss_fn_inputs={k: d.loss_fn_inputs[k] for k in ("target_tokens", "weights")}
        )
        for d in DATA
    ]
    return [
        value
        for out in client.forward(data, "cross_entropy").result().loss_fn_outputs
        for value in out["logprobs"].data
    ]


def new_client(service: Any, **more: Any) -> Any:
    return service.create_lora_training_client(base_model=MODEL, rank=4, seed=1, **more).result()


def test_an_uploaded_loss_equals_the_two_passes_of_the_client(service: Any) -> None:
    handle = service.create_custom_loss(policy, {"logprobs": 1, "old": 1, "advantages": 1}).result()
    assert handle.loss_id, "the server asks for uploads"
    uploaded, local = new_client(service), new_client(service)
    before = logprobs_of(uploaded)
    for _ in range(3):
        futures = [
            client.forward_backward_custom(DATA, loss) for client, loss in ((uploaded, handle), (local, on_the_client))
        ]
        steps = [client.optim_step(ADAM) for client in (uploaded, local)]
        one, other = (future.result() for future in futures)
        for name in ("loss:sum", "custom/ratio:mean", "custom/clipped:sum"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4), name
        norms = [step.result().metrics["grad_norm"] for step in steps]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    mine, theirs = logprobs_of(uploaded), logprobs_of(local)
    assert mine == pytest.approx(theirs, abs=2e-3)
    assert max(abs(a - b) for a, b in zip(mine, before, strict=True)) > 0.1, "the test must have trained"


def test_a_loss_of_another_session_does_not_come_through_the_sdk(service: Any) -> None:
    def unusual(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.linalg.svdvals(logprobs[None, :]).sum(), {}

    with pytest.raises(tinker.BadRequestError, match="svdvals"):
        service.create_custom_loss(unusual, {"logprobs": 1}).result()


def test_dimuon_trains_saves_and_resumes(service: Any) -> None:
    config, params = types.DimuonOptimizerConfig(), types.DimuonParams(learning_rate=0.05)
    client = new_client(service, optimizer=config)
    assert client.get_info().optimizer_config.model_dump() == config.model_dump()
    data = [
        types.Datum(
            model_input=d.model_input, loss_fn_inputs={k: d.loss_fn_inputs[k] for k in ("target_tokens", "weights")}
        )
        for d in DATA
    ]
    losses = []
    for _ in range(4):
        loss = client.forward_backward(data, "cross_entropy")
        client.optim_step(params).result()
        losses.append(loss.result().metrics["loss:sum"])
    assert losses[-1] < losses[0]
    with pytest.raises(tinker.BadRequestError, match="dimuon"):
        client.optim_step(ADAM).result()
    path = client.save_state("resumable").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    resumed = resumed.result() if hasattr(resumed, "result") else resumed
    assert resumed.get_info().optimizer_config.model_dump() == config.model_dump()
    for each in (client, resumed):
        each.forward_backward(data, "cross_entropy").result()
        each.optim_step(params).result()
    assert logprobs_of(client) == logprobs_of(resumed)
