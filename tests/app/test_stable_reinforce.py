"""stable_reinforce through HTTP: what was recorded at sampling counts, not what a client says of it."""

from __future__ import annotations

import math
from typing import Any

from tests.app.conftest import MODEL
from tests.support.api import Api

PROMPT = [10, 20, 30, 40]


async def sampled(api: Api, session: str, **more: Any) -> tuple[str, list[int], list[float]]:
    """A recorded sequence of the base model: its id, tokens and logprobs."""
    opened = await api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    promise = (
        await api.post(
            "asample",
            sampling_session_id=opened.json()["sampling_session_id"],
            seq_id=0,
            num_samples=1,
            prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            sampling_params={"max_tokens": 5, "seed": 3, "stop": [], **more},
            record_stability_info=True,
        )
    ).json()
    outcome = await api.result(promise["request_id"])
    sequence = outcome["sequences"][0]
    return promise["sample_sequence_ids"][0], sequence["tokens"], sequence["logprobs"]


def example(tokens: list[int], logprobs: list[float], sequence_id: str | None, offset: int = 0) -> dict[str, Any]:
    """The sampled tokens behind the prompt, as a client of policy gradients writes them."""
    whole = [*PROMPT, *tokens]
    pad = len(PROMPT) - 1
    datum: dict[str, Any] = {
        "model_input": whole[:-1],
        "loss_fn_inputs": {
            "target_tokens": whole[1:],
            "logprobs": [0.0] * pad + logprobs,
            "advantages": [0.0] * pad + [1.0] * len(tokens),
        },
    }
    if sequence_id is not None:
        prompt = {"type": "prompt_tokens", "sequence_id": sequence_id}
        drawn = {"type": "sampled_tokens", "sequence_id": sequence_id}
        datum["model_input_spans"] = [{**prompt, "length": pad + 1}, {**drawn, "length": len(tokens) - 1}]
        datum["loss_fn_input_spans"] = [
            {**prompt, "offset": 1, "length": pad},
            {**drawn, "offset": offset, "length": len(tokens)},
        ]
    return datum


async def ratio(api: Api, model: str, datum: dict[str, Any]) -> float:
    outcome = await api.do("forward_backward", model_id=model, data=[datum], loss_fn="stable_reinforce")
    return float(outcome["metrics"]["ratio:mean"])


async def test_a_fresh_model_agrees_with_what_was_recorded_whatever_the_client_says(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    sequence, tokens, logprobs = await sampled(api, session, temperature=0.7)
    wrong = [value - 1.0 for value in logprobs]
    assert abs(await ratio(api, model, example(tokens, wrong, sequence)) - 1.0) < 1e-3
    assert abs(await ratio(api, model, example(tokens, logprobs, None)) - 1.0) > 1e-2, "tempered logprobs are others"


async def test_without_a_record_the_given_logprobs_count(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    sequence, tokens, logprobs = await sampled(api, session)
    wrong = [value - 1.0 for value in logprobs]
    for unknown in (None, "no-such-sequence"):
        assert abs(await ratio(api, model, example(tokens, wrong, unknown)) - math.e) < 1e-2
    other = await api.other()
    foreign = await other.model(await other.session())
    assert abs(await ratio(other, foreign, example(tokens, wrong, sequence)) - math.e) < 1e-2, "not another project's"


async def test_spans_that_do_not_fit_their_sequence_are_refused(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    sequence, tokens, logprobs = await sampled(api, session)
    swapped = [*tokens[:-1], (tokens[-1] + 1) % 250]
    for wrong in (example(swapped, logprobs, sequence), example(tokens, logprobs, sequence, offset=1)):
        data = [example(tokens, logprobs, sequence), wrong]
        answer = await api.post("forward_backward", model_id=model, data=data, loss_fn="stable_reinforce")
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["field"] == "data[1].loss_fn_input_spans"
        assert "sequence" in answer.text or "sampled" in answer.text


async def test_the_penalty_holds_the_policy_back(api: Api) -> None:
    session = await api.session()
    gaps = []
    sequence, tokens, logprobs = await sampled(api, session)
    for number, coefficient in enumerate((0.0, 50.0)):
        model = await api.model(session, number)
        for _ in range(6):
            outcome = await api.do(
                "forward_backward",
                model_id=model,
                data=[example(tokens, logprobs, sequence)],
                loss_fn="stable_reinforce",
                loss_fn_config={"kl_coeff": coefficient},
            )
            await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.02})
        gaps.append(outcome["metrics"]["logprob_gap_abs:mean"])
    assert gaps[1] < 0.5 * gaps[0]


async def test_a_repeat_is_recognised_and_other_spans_are_another_request(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    sequence, tokens, logprobs = await sampled(api, session)
    body = {"model_id": model, "seq_id": 1, "loss_fn": "stable_reinforce"}
    first = await api.submit("forward_backward", data=[example(tokens, logprobs, sequence)], **body)
    assert await api.submit("forward_backward", data=[example(tokens, logprobs, sequence)], **body) == first
    answer = await api.post("forward_backward", data=[example(tokens, logprobs, "another")], **body)
    assert answer.status_code == 400


async def test_capabilities_say_whose_objective_it_is(api: Api) -> None:
    notes = (await api.client.get("get_server_capabilities")).json()["notes"]
    assert any("stable_reinforce" in note and "docs/losses.md" in note for note in notes)
