"""The unmodified SDK against a real server process: what a user's script does."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import MODEL
from tests.support.server import RunningServer

ADAM = types.AdamParams(learning_rate=1e-2)


def example(*tokens: int) -> types.Datum:
    """Each token predicts the next."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": torch.tensor(tokens[1:]),
            "weights": torch.ones(len(tokens) - 1),
        },
    )


DATA = [example(5, 6, 7, 8), example(9, 10, 11), example(20, 21, 22, 23, 24)]


def logprobs(client: Any, data: list[types.Datum] = DATA) -> list[list[float]]:
    """Of each example, under the client's present weights."""
    output = client.forward(data, "cross_entropy").result()
    return [list(each["logprobs"].data) for each in output.loss_fn_outputs]


def step(client: Any, data: list[types.Datum] = DATA) -> Any:
    """One forward_backward and one optim_step, both on their way at once."""
    loss = client.forward_backward(data, "cross_entropy")
    applied = client.optim_step(ADAM)
    applied.result()
    return loss.result()


@pytest.fixture
def client(service: Any) -> Any:
    """A training client of rank 4."""
    return service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def test_training_lowers_the_loss_and_tells_its_metrics(client: Any) -> None:
    losses = [step(client).metrics["loss:sum"] for _ in range(5)]
    assert losses[-1] < losses[0] * 0.8
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (MODEL, 4, True)


def test_the_tokenizer_is_found(client: Any) -> None:
    tokenizer = client.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def wide_example(seed: int) -> types.Datum:
    """About 2 MB: 60 tokens with 3000 weighted targets each, so that two examples fill a chunk of the SDK."""
    random = torch.Generator().manual_seed(seed)
    return types.Datum(
        model_input=types.ModelInput.from_ints(torch.randint(3, 259, (60,), generator=random).tolist()),
        loss_fn_inputs={
            "target_tokens": torch.randint(3, 259, (60, 3000), generator=random),
            "weights": torch.rand((60, 3000), generator=random) / 3000 + 1e-6,
        },
    )


def test_the_chunks_of_one_call_are_one_batch(service: Any, client: Any, server: RunningServer) -> None:
    other = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    data = [wide_example(seed) for seed in range(5)]
    posts = server.log.read_text().count("POST /api/v1/forward_backward")
    output = client.forward_backward(data, "cross_entropy").result()
    chunks = server.log.read_text().count("POST /api/v1/forward_backward") - posts
    assert chunks == 3
    assert [each["logprobs"].shape for each in output.loss_fn_outputs] == [[60, 3000]] * 5
    for each in data:
        other.forward_backward([each], "cross_entropy").result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (client, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_custom_losses_of_the_client(service: Any, client: Any) -> None:
    def negated(data: list[types.Datum], scores: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -sum(each.sum() for each in scores)
        return loss, {"examples": float(len(data))}

    plain = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    output = client.forward_backward_custom(DATA, negated).result()
    assert output.metrics["examples"] == 3.0
    client.optim_step(ADAM).result()
    step(plain)
    for custom, usual in zip(logprobs(client), logprobs(plain), strict=True):
        assert custom == pytest.approx(usual, abs=1e-4)


def test_resuming_with_and_without_the_optimizer(service: Any, client: Any) -> None:
    for _ in range(3):
        step(client)
    path = client.save_state("resume-me").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    assert logprobs(client) == logprobs(resumed) == logprobs(fresh)
    other = [example(30, 31, 32, 33)]
    for each in (client, resumed, fresh):
        step(each, other)
    live, with_state, without = [logprobs(each) for each in (client, resumed, fresh)]
    assert live == with_state
    assert live != without


def test_sampling_from_trained_weights_agrees_with_training(client: Any) -> None:
    for _ in range(20):
        step(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    tokens = [5, 6, 7, 8]
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scores[0] is None
    assert scores[1:] == pytest.approx(logprobs(client)[0], abs=1e-3)
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    result = sampler.sample(types.ModelInput.from_ints([5]), num_samples=2, sampling_params=params).result()
    assert [sequence.tokens for sequence in result.sequences] == [[6, 7, 8], [6, 7, 8]]
    assert all(len(sequence.logprobs) == 3 for sequence in result.sequences)


def test_much_work_that_nobody_waits_for_does_not_get_stuck(client: Any) -> None:
    for _ in range(20):
        client.forward_backward(DATA, "cross_entropy")
        client.optim_step(ADAM)
    sampler = client.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()
    assert scores[1:] == pytest.approx(logprobs(client)[0], abs=1e-3)
    assert sum(scores[1:]) > -1


def test_named_sampler_weights_and_the_base_model(service: Any, client: Any) -> None:
    step(client)
    path = client.save_weights_for_sampler("named").result().path
    named = service.create_sampling_client(model_path=path).result()
    base = service.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    trained, plain = [each.compute_logprobs(prompt).result() for each in (named, base)]
    assert trained[1:] != pytest.approx(plain[1:], abs=1e-3)
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    futures = [base.sample(prompt, num_samples=4, sampling_params=params) for _ in range(20)]
    drawn = [[sequence.tokens for sequence in future.result().sequences] for future in futures]
    assert all(each == drawn[0] for each in drawn)
    assert len({tuple(tokens) for tokens in drawn[0]}) == 4


def test_lists_and_deletion(service: Any, server: RunningServer, client: Any) -> None:
    training = client.save_state("listed").result().path
    sampler = client.save_weights_for_sampler("listed").result().path
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    run_id = client.model_id
    assert run_id in [run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs]
    run = rest.get_training_run(run_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora) == (MODEL, 4, True)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == training
    listed = {each.tinker_path: each for each in rest.list_checkpoints(run_id).result().checkpoints}
    assert set(listed) == {training, sampler}
    assert listed[training].size_bytes > 0
    assert training in [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]
    info = rest.get_weights_info_by_tinker_path(training).result()
    assert (info.base_model, info.lora_rank) == (MODEL, 4)
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    assert [each.tinker_path for each in rest.list_checkpoints(run_id).result().checkpoints] == [training]
    session = rest.get_session(run_id.split(":")[0]).result()
    assert session.training_run_ids == [run_id]


def test_what_is_wrong_is_a_typed_error_at_once_and_the_client_goes_on(service: Any, client: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="no_such_loss"):
        client.forward_backward(DATA, "no_such_loss").result()
    with pytest.raises(tinker.BadRequestError, match="259"):
        client.forward_backward([example(5, 300)], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="not served"):
        service.create_lora_training_client(base_model="acme/absent").result()
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state("tinker://nobody:train:0/weights/x").result()
    assert step(client).metrics["loss:sum"] > 0


def test_a_session_that_is_over_takes_no_work(server: RunningServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as short:
        late = short.create_lora_training_client(base_model=MODEL, rank=4).result()
        step(late)
    with server.client() as http:
        body = {"model_id": late.model_id, "adam_params": {}}
        answer = http.post("optim_step", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_ended")


def test_two_clients_do_not_touch_each_other(service: Any, client: Any) -> None:
    other = service.create_lora_training_client(base_model=MODEL, rank=4, seed=2).result()
    before = logprobs(other)
    for _ in range(3):
        step(client)
    assert logprobs(other) == before
