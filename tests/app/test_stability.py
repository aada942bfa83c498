"""What is remembered of sampled sequences, for whom, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.services.stability import Span
from app.settings import Settings
from schemas.errors import InvalidRequest, NotFound
from tests.app.conftest import MODEL
from tests.support.api import Api, serving

PROMPT = [5, 6, 7, 8]


async def _project(api: Api) -> str:
    runs = (await api.client.get("training_runs")).json()["training_runs"]
    return str(runs[0]["model_owner"])


async def _sampler(api: Api, **what: Any) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0, **what}
    return str((await api.post("create_sampling_session", **body)).json()["sampling_session_id"])


async def _sample(api: Api, sampler: str, *, record: bool = True, **params: Any) -> tuple[list[str], list[Any]]:
    """Sequence ids and sequences."""
    answer = await api.post(
        "asample",
        sampling_session_id=sampler,
        prompt=PROMPT,
        num_samples=2,
        record_stability_info=record,
        sampling_params={"max_tokens": 6, "seed": 1, "stop": [], **params},
    )
    assert answer.status_code == 200, answer.text
    promise = answer.json()
    outcome = await api.result(promise["request_id"])
    return promise["sample_sequence_ids"], outcome["sequences"]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
async def test_a_sequence_is_remembered_as_it_was_sampled(api: Api, temperature: float) -> None:
    model = await api.model()
    await api.train(model, steps=2)
    path = (await api.do("save_weights_for_sampler", model_id=model, path="x"))["path"]
    trained_on = await _sampler(api, model_path=path)
    ids, sequences = await _sample(api, trained_on, temperature=temperature)
    services, project = api.edge.app.state.services, await _project(api)
    for sequence_id, sequence in zip(ids, sequences, strict=True):
        known = await services.stability.stability(project, sequence_id, 0, 6)
        assert known.tokens.tolist() == sequence["tokens"]
        assert known.logprobs.tolist() == pytest.approx(sequence["logprobs"])
        assert (known.temperature, known.base_model) == (temperature, MODEL)
        assert known.checkpoint_id is not None
        # The model's own view of what was drawn: the trainer's forward pass on the same weights.
        data = {
            "model_input": PROMPT + sequence["tokens"][:-1],
            "loss_fn_inputs": {"target_tokens": PROMPT[1:] + sequence["tokens"]},
        }
        plain = (await api.scores(model, [data]))[0][len(PROMPT) - 1 :]
        assert known.plain_logprobs.tolist() == pytest.approx(plain, abs=1e-3)
        assert (known.plain_logprobs.tolist() == known.logprobs.tolist()) == (temperature != 0.5)


async def test_spans_are_cut_out_and_must_lie_inside(api: Api) -> None:
    await api.model()
    ids, sequences = await _sample(api, await _sampler(api, base_model=MODEL))
    stability, project = api.edge.app.state.services.stability, await _project(api)
    first, second = await stability.spans(project, [Span(ids[1], 2, 3), Span(ids[0], 6, 0)])
    assert first.tokens.tolist() == sequences[1]["tokens"][2:5]
    assert first.plain_logprobs.tolist() == pytest.approx(sequences[1]["logprobs"][2:5])
    assert first.checkpoint_id is None
    assert second.tokens.size == 0
    for offset, length in ((-1, 2), (0, 7), (6, 1), (0, -1)):
        with pytest.raises(InvalidRequest, match="6 sampled tokens"):
            await stability.stability(project, ids[0], offset, length)


async def test_only_what_was_asked_for_is_remembered_and_only_for_its_project(api: Api) -> None:
    await api.model()
    sampler = await _sampler(api, base_model=MODEL)
    unrecorded, _ = await _sample(api, sampler, record=False)
    recorded, _ = await _sample(api, sampler)
    stability, project = api.edge.app.state.services.stability, await _project(api)
    await stability.stability(project, recorded[0], 0, 6)
    for owner, sequence_id in ((project, unrecorded[0]), ("other", recorded[0]), (project, "nobody:sample:0:0:0")):
        with pytest.raises(NotFound, match="nothing is remembered") as caught:
            await stability.stability(owner, sequence_id, 0, 1)
        assert caught.value.code == "unknown_sequence"


async def test_it_survives_a_restart_and_is_forgotten_in_time(tiny_settings: Callable[..., Settings]) -> None:
    settings = tiny_settings(stability_retention=600)
    async with serving(settings) as api:
        await api.model()
        project = await _project(api)
        sampler = await _sampler(api, base_model=MODEL)
        ids, _ = await _sample(api, sampler)
        answer = await api.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=9,
            prompt=PROMPT,
            record_stability_info=True,
            sampling_params={"max_tokens": 200, "stop": []},
        )
        api.edge.app.state.services.operations.settling.settle = _nothing  # the process is gone before it could end
        cut = answer.json()
    async with serving(settings) as api:
        stability = api.edge.app.state.services.stability
        await stability.stability(project, ids[0], 0, 6)
        assert len((await api.result(cut["request_id"]))["sequences"][0]["tokens"]) == 200
        await stability.stability(project, cut["sample_sequence_ids"][0], 0, 200)
        clock = stability._clock
        stability._clock = lambda: datetime.now(UTC) + timedelta(seconds=601)
        with pytest.raises(NotFound):
            await stability.stability(project, ids[0], 0, 6)
        await stability.sweep()
        stability._clock = clock
        with pytest.raises(NotFound):
            await stability.stability(project, ids[0], 0, 6)


async def _nothing(*_: object) -> None:
    """In place of writing an outcome."""
