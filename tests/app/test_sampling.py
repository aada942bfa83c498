"""Sampling: which weights are sampled, what is asked for, what does not fit."""

from __future__ import annotations

from typing import Any

from schemas.proto import tinker_public_pb2 as pb
from tests.app.conftest import MODEL
from tests.support.api import Api

PROMPT = [5, 6, 7, 8, 9]


async def _sampler(api: Api, number: int = 0, **what: Any) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": number, **what}
    answer = await api.post("create_sampling_session", **body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["sampling_session_id"])


async def _prompt_scores(api: Api, sampler: str) -> list[float]:
    outcome = await api.do(
        "asample",
        sampling_session_id=sampler,
        prompt=PROMPT,
        prompt_logprobs=True,
        sampling_params={"max_tokens": 1},
    )
    return list(outcome["prompt_logprobs"][1:])


async def test_an_ephemeral_save_opens_a_sampler_at_once(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.train(model, steps=2)
    for number, kind in enumerate(("snapshot", "inflight")):
        outcome = await api.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=number, kind=kind)
        assert outcome == {
            "sampling_session_id": f"{session}:sample:{number}",
            "type": "save_weights_for_sampler",
        }
        scored = await _prompt_scores(api, outcome["sampling_session_id"])
        trained = (await api.scores(model))[0]
        assert max(abs(a - b) for a, b in zip(scored, trained, strict=True)) < 1e-3
    assert (await api.client.get("checkpoints")).json()["checkpoints"] == []


async def test_a_sampler_keeps_its_weights_and_leaves_training_alone(api: Api) -> None:
    model = await api.model()
    await api.train(model)
    path = (await api.do("save_weights_for_sampler", model_id=model, path="x"))["path"]
    sampler = await _sampler(api, model_path=path)
    before = await _prompt_scores(api, sampler)
    await api.train(model, steps=3)
    trained = await api.scores(model)
    assert await _prompt_scores(api, sampler) == before
    assert await api.scores(model) == trained


async def test_samples_of_the_base_model_and_its_protobuf(api: Api) -> None:
    sampler = await _sampler(api, base_model=MODEL)
    promise = await api.submit(
        "asample",
        sampling_session_id=sampler,
        prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        num_samples=2,
        sampling_params={"max_tokens": 4, "seed": 3, "stop": []},
        topk_prompt_logprobs=2,
        prompt_logprobs=True,
    )
    as_json = await api.result(promise)
    answer = await api.client.post(
        "retrieve_future", json={"request_id": promise}, headers={"Accept": "application/x-protobuf"}
    )
    assert answer.headers["content-type"] == "application/x-protobuf"
    message = pb.SampleResponse.FromString(answer.content)
    assert len(message.sequences) == len(as_json["sequences"]) == 2
    assert all(len(sequence["tokens"]) == 4 for sequence in as_json["sequences"])
    assert as_json["sequences"][0]["tokens"] != as_json["sequences"][1]["tokens"]
    assert len(as_json["topk_prompt_logprobs"]) == len(PROMPT)
    assert as_json["topk_prompt_logprobs"][0] is None


async def test_the_same_seed_gives_the_same_tokens(api: Api) -> None:
    sampler = await _sampler(api, base_model=MODEL)

    async def tokens(seed: int) -> list[int]:
        params = {"max_tokens": 8, "seed": seed, "stop": []}
        outcome = await api.do("asample", sampling_session_id=sampler, prompt=PROMPT, sampling_params=params)
        return list(outcome["sequences"][0]["tokens"])

    assert await tokens(1) == await tokens(1)
    assert await tokens(1) != await tokens(2)


async def test_target_logprobs_come_back_in_the_layout_they_were_asked_in(api: Api) -> None:
    sampler = await _sampler(api, base_model=MODEL)
    dense = {"data": [[6, 9], [7, -1], [8, -1], [9, -1]], "dtype": "int64"}
    sparse = {
        "data": [6, 9, 7, 8, 9],
        "dtype": "int64",
        "shape": [4, 2],
        "sparse_crow_indices": [0, 2, 3, 4, 5],
        "sparse_col_indices": [0, 1, 0, 0, 0],
    }
    body = {"sampling_session_id": sampler, "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
    as_dense = (await api.do("asample", **body, target_prompt_logprobs=dense))["target_prompt_logprobs"]
    assert as_dense["shape"] == [4, 2]
    promise = await api.submit("asample", **body, target_prompt_logprobs=sparse)
    await api.result(promise)
    answer = await api.client.post(
        "retrieve_future", json={"request_id": promise}, headers={"Accept": "application/x-protobuf"}
    )
    scored = pb.SampleResponse.FromString(answer.content).target_prompt_logprobs
    assert scored.WhichOneof("encoding") == "sparse_csr"
    assert abs((await _prompt_scores(api, sampler))[0] - as_dense["data"][0]) < 1e-4


async def test_what_a_sampler_is_can_be_asked(api: Api) -> None:
    model = await api.model()
    path = (await api.do("save_weights_for_sampler", model_id=model, path="x"))["path"]
    on_path, on_base = await _sampler(api, model_path=path), await _sampler(api, base_model=MODEL)
    assert (await api.client.get(f"samplers/{on_path}")).json() == {
        "sampler_id": on_path,
        "base_model": MODEL,
        "model_path": path,
    }
    assert (await api.client.get(f"samplers/{on_base}")).json() == {"sampler_id": on_base, "base_model": MODEL}


async def test_a_sampler_without_its_weights_answers_404(api: Api) -> None:
    model = await api.model()
    path = (await api.do("save_weights_for_sampler", model_id=model, path="x"))["path"]
    sampler = await _sampler(api, model_path=path)
    deleted = await api.client.delete(f"training_runs/{model}/checkpoints/sampler_weights/x")
    assert deleted.status_code == 204
    answer = await api.post("asample", sampling_session_id=sampler, prompt=PROMPT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "weights_deleted")


async def test_what_does_not_fit_the_context_is_refused_with_its_numbers(api: Api) -> None:
    sampler = await _sampler(api, base_model=MODEL)
    body = {"sampling_session_id": sampler, "sampling_params": {"max_tokens": 200}}
    answer = await api.post("asample", prompt=[5] * 100, **body)
    assert answer.status_code == 400
    for number in ("100", "200", "256"):
        assert number in answer.json()["detail"]
    assert (await api.post("asample", prompt=[5] * 256, sampling_session_id=sampler)).status_code == 400
    assert (await api.post("asample", prompt=[5, 259], sampling_session_id=sampler)).status_code == 400


async def test_without_max_tokens_a_sample_ends_with_the_context_and_not_before(api: Api) -> None:
    sampler = await _sampler(api, base_model=MODEL)
    outcome = await api.do(
        "asample", sampling_session_id=sampler, prompt=[5] * 200, sampling_params={"stop": [], "seed": 1}
    )
    assert len(outcome["sequences"][0]["tokens"]) == 56
    assert outcome["sequences"][0]["stop_reason"] == "length"


async def test_a_cancelled_sample_ends_and_training_requests_cannot_be_cancelled(api: Api) -> None:
    sampler = await _sampler(api, base_model=MODEL)
    promise = await api.submit(
        "asample",
        sampling_session_id=sampler,
        prompt=[5],
        num_samples=64,
        sampling_params={"stop": [], "max_tokens": 250},
    )
    assert (await api.post("cancel_future", request_id=promise)).status_code == 204
    assert "error" in await api.result(promise)
    model = await api.model()
    step = await api.submit("optim_step", model_id=model, adam_params={})
    assert (await api.post("cancel_future", request_id=step)).status_code == 400
    assert "error" not in await api.result(step)
