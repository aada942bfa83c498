"""Sampling through the unmodified SDK: many samples at once, copies of a client, inflight weights, every field."""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import MODEL
from tests.support.server import RunningServer, environment, serve

PROMPT = types.ModelInput.from_ints([5, 6, 7, 8, 9])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[RunningServer]:
    """A server that announces results from 4 KiB on, and logs every request."""
    data_dir = tmp_path_factory.mktemp("sampling") / "data"
    arguments = ["--base-model", f"{MODEL}={tiny_folder}", "--threads", "1", "--shutdown-grace", "2"]
    with serve(data_dir, [*arguments, "--metadata-only-above-kib", "4", "--log-level", "debug"]) as running:
        yield running


@pytest.fixture
def sampler(service: Any) -> Any:
    return service.create_sampling_client(base_model=MODEL).result()


def params(**more: Any) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 4, "seed": 1, "stop": [], **more})


def requests(server: RunningServer, since: int = 0) -> list[tuple[str, int]]:
    """Route and status of every request that the server answered behind a place in its log."""
    found = re.findall(r"POST /api/v1/(\w+) (\d+) ", server.log.read_text()[since:])
    return [(route, int(status)) for route, status in found]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_many_samples_at_once_are_waited_for_by_one_request(server: RunningServer, sampler: Any) -> None:
    place = len(server.log.read_text())
    futures = [sampler.sample(PROMPT, 1, params(seed=number)) for number in range(200)]
    results = [future.result(timeout=120) for future in futures]
    assert len({result.sequences[0].sequence_id for result in results}) == 200
    assert all(len(result.sequences[0].tokens) == 4 for result in results)
    wait_for(lambda: requests(server, place).count(("retrieve_future", 200)) == 200)  # logged after the answer
    answered = requests(server, place)
    assert answered.count(("asample", 200)) == 200
    assert ("retrieve_future", 408) not in answered, "nobody polled for a sample that was not done"
    polls = [status for route, status in answered if route == "retrieve_futures"]
    assert set(polls) == {200}
    assert len(polls) < 100


def test_results_that_the_client_has_are_dropped(server: RunningServer, sampler: Any) -> None:
    sampler.sample(PROMPT, 1, params()).result()
    request_id = ""

    def dropped() -> bool:
        with server.client() as http:
            body = {"target": {"type": "sampling_session", "sampling_session_id": sampler._sampling_session_id}}
            nonlocal request_id
            listed = http.post("retrieve_futures", json={**body, "timeout": 0}).json()["completions"]
            request_id = listed[0]["request_id"]
            return bool(listed[0]["state"] == "failed")

    wait_for(dropped)
    with server.client() as http:
        assert http.post("retrieve_future", json={"request_id": request_id}).status_code == 410


def test_large_results_are_announced_first_to_clients_that_poll_by_themselves(
    server: RunningServer, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5] * 200),
        loss_fn_inputs={"target_tokens": torch.tensor([6] * 200), "weights": torch.ones(200)},
    )
    place = len(server.log.read_text())
    output = client.forward([datum] * 50, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 50
    wait_for(lambda: requests(server, place).count(("retrieve_future", 200)) == 2)  # the size, then the result


def test_a_sample_that_is_abandoned_stops(server: RunningServer, sampler: Any) -> None:
    place = len(server.log.read_text())
    *others, last = [sampler.sample(PROMPT, 500, params(max_tokens=250)) for _ in range(4)]  # seconds of work anywhere

    async def waiting() -> Any:
        return await last

    async def impatient() -> None:
        waits = asyncio.create_task(waiting())
        # The SDK cancels only what it knows the number of: what its poller waits for.
        await asyncio.to_thread(wait_for, lambda: sampler._futures_poller and len(sampler._futures_poller._events) == 4)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(impatient())
    for future in (*others, last):
        future.future().cancel()
    wait_for(lambda: requests(server, place).count(("cancel_future", 204)) == 4)
    began = time.monotonic()
    assert len(sampler.sample(PROMPT, 1, params()).result().sequences[0].tokens) == 4
    assert time.monotonic() - began < 10


def test_copies_of_a_client_sample_side_by_side(server: RunningServer, sampler: Any, tmp_path: Path) -> None:
    own = sampler.sample(PROMPT, 1, params()).result().sequences[0]
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    found = [copy.sample(PROMPT, 1, params()).result().sequences[0] for copy in copies]
    assert [sequence.tokens for sequence in found] == [own.tokens, own.tokens]
    numbers = [int(sequence.sequence_id.split(":")[-2]) for sequence in [own, *found]]
    assert numbers == [0, 10**9, 2 * 10**9]
    stored = tmp_path / "client.pickle"
    stored.write_bytes(pickle.dumps(sampler))
    script = (
        "import os, pickle, sys; from tinker import types; client = pickle.load(open(sys.argv[1], 'rb'));"
        "prompt = types.ModelInput.from_ints([5, 6, 7, 8, 9]);"
        "params = types.SamplingParams(max_tokens=4, seed=1, stop=[]);"
        "print(client.sample(prompt, 1, params).result().sequences[0].sequence_id, flush=True);"
        "os._exit(0)"  # the SDK's threads, still running, now and then abort an interpreter that ends by itself
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(stored)], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.strip().split(":")[-2]) == 3 * 10**9


def test_inflight_clients_follow_the_newest_weights_and_snapshots_do_not(service: Any) -> None:
    client = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    tokens = [5, 6, 7, 8, 9]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(tokens[1:]), "weights": torch.ones(4)},
    )

    def scores(one: Any) -> list[float]:
        return list(one.compute_logprobs(PROMPT).result()[1:])

    old = client.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = client.save_weights_and_get_sampling_client().result()
    before = scores(old)
    for _ in range(4):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    new = client.save_weights_and_get_sampling_client(kind="inflight").result()
    trained = list(client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    np.testing.assert_allclose(scores(old), trained, atol=1e-3)
    np.testing.assert_allclose(scores(new), trained, atol=1e-3)
    np.testing.assert_allclose(scores(snapshot), before, atol=1e-6)
    np.testing.assert_allclose(scores(pickle.loads(pickle.dumps(old))), trained, atol=1e-3)
    assert abs(np.subtract(trained, before)).max() > 0.05


def test_every_field_of_a_sample(sampler: Any) -> None:
    targets = torch.tensor([[6, 9], [7, -1], [-1, -1], [9, 0]])
    dense = sampler.sample(
        PROMPT,
        num_samples=3,
        sampling_params=params(temperature=0.7, top_k=50, top_p=0.9, seed=2**64 + 5),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch(targets),
        prompt_alt_tokens_k=4,
    ).result()
    assert len(dense.sequences) == 3
    assert len({sequence.sequence_id for sequence in dense.sequences}) == 3
    for sequence in dense.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.topk_logprobs) == 4
        assert all(len(row) == 2 for row in sequence.topk_logprobs)
    scored = sampler.compute_logprobs(PROMPT).result()
    assert dense.prompt_logprobs == pytest.approx(scored)
    assert scored[0] is None
    assert [None if row is None else len(row) for row in dense.topk_prompt_logprobs] == [None, 3, 3, 3, 3]
    values = np.array(dense.target_prompt_logprobs.data).reshape(4, 2)
    np.testing.assert_allclose(values[[0, 1, 3], [0, 0, 0]], [scored[1], scored[2], scored[4]], atol=1e-5)
    assert values[1, 1] == values[2, 0] == values[2, 1] == 0.0
    assert values[3, 1] < 0
    assert dense.prompt_alt_tokens.tokens.shape == [4, 4]
    assert max(dense.prompt_alt_tokens.logprobs.data) < 0
    assert dense.prompt_cache_hit_tokens == 0

    wide = torch.full((4, 8), -1)  # so few of so many cells that the SDK sends them as CSR
    wide[:, :2] = targets
    sparse = sampler.sample(
        PROMPT, 1, params(), target_prompt_logprobs=types.TensorData.from_torch_sparse(wide, pad_value=-1)
    ).result()
    answer = sparse.target_prompt_logprobs
    assert answer.sparse_crow_indices == [0, 2, 3, 3, 5]
    assert answer.sparse_col_indices == [0, 1, 0, 0, 1]
    np.testing.assert_allclose(answer.data, values[[0, 0, 1, 3, 3], [0, 1, 0, 0, 1]], atol=1e-5)

    suffix = sampler.sample(
        PROMPT, 1, params(), include_prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=2
    ).result()
    assert suffix.prompt_logprobs[:3] == [None, None, None]
    assert suffix.prompt_logprobs[3:] == pytest.approx(scored[3:])
    assert [row is None for row in suffix.topk_prompt_logprobs] == [True, True, True, False, False]


def test_seeds_of_any_size_are_told_apart_and_repeat(sampler: Any) -> None:
    def draw(seed: int) -> list[int]:
        return list(sampler.sample(PROMPT, 1, params(max_tokens=12, seed=seed)).result().sequences[0].tokens)

    seeds = [1, 2**32 + 1, 2**63, 2**64 + 1, 2**200]
    drawn = [draw(seed) for seed in seeds]
    assert len({tuple(tokens) for tokens in drawn}) == len(seeds)
    assert [draw(seed) for seed in seeds] == drawn


def test_a_client_can_ask_for_its_samples_to_be_remembered(service: Any) -> None:
    recording = service.create_sampling_client(base_model=MODEL, record_stability_info=True).result()
    result = recording.sample(PROMPT, 2, params(temperature=0.5)).result()
    assert [sequence.sequence_id.split(":")[-1] for sequence in result.sequences] == ["0", "1"]


def test_threads_share_a_client(sampler: Any) -> None:
    ids: list[str] = []

    def work() -> None:
        for _ in range(10):
            ids.append(sampler.sample(PROMPT, 1, params()).result(timeout=60).sequences[0].sequence_id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(ids)) == 40


@pytest.mark.slow
def test_without_the_flags_the_sdk_polls_for_each_sample(tmp_path: Path, tiny_folder: Path) -> None:
    flags = ["--sample-use-retrieve-futures", "false", "--sample-join-sampling-session", "false"]
    arguments = ["--base-model", f"{MODEL}={tiny_folder}", "--threads", "1", "--shutdown-grace", "2", *flags]
    arguments += ["--log-level", "debug"]
    with (
        serve(tmp_path / "data", arguments) as running,
        tinker.ServiceClient(base_url=running.url, api_key=running.key) as service,
    ):
        sampler = service.create_sampling_client(base_model=MODEL).result()
        futures = [sampler.sample(PROMPT, 1, params(seed=number)) for number in range(20)]
        assert all(len(future.result(timeout=60).sequences[0].tokens) == 4 for future in futures)
        copy = pickle.loads(pickle.dumps(sampler)).sample(PROMPT, 1, params()).result()
        assert int(copy.sequences[0].sequence_id.split(":")[-2]) >= 10**9
        routes = {route for route, _ in requests(running)}
        assert "retrieve_futures" not in routes
        assert "join_sampling_session" not in routes
