"""The vLLM sampler against a plain pass of the trainer's own model, on a real vLLM process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.sampling.vllm.environment import VllmEnvironment
from engines.sampling.vllm.sampler import VllmSampler
from schemas.errors import EngineFailure, InvalidRequest, Unavailable
from schemas.operations import SampleResult, SamplingParams
from tests.vllm.conftest import GREEDY, PROMPT, World, run, sample

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
BOUND = 4e-5
DRAWN = SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop=())


def test_greedy_tokens_are_the_likeliest_ones_with_and_without_adapters(world: World, vllm: VllmSampler) -> None:
    names: list[str | None] = [None, "a", "b"]
    outcome = run(vllm, **{str(n): sample(PROMPT, adapter_folder=world.folders[n] if n else None) for n in names})
    drawn = []
    for name in names:
        sequence = outcome.sequence(str(name))
        tokens = sequence.tokens.tolist()
        rows = world.forced(PROMPT + tokens, name)[len(PROMPT) - 1 : -1]
        assert tokens == rows.argmax(-1).tolist()
        np.testing.assert_allclose(sequence.logprobs, rows.max(-1), atol=BOUND)
        assert (sequence.stop_reason, len(tokens)) == ("length", 5)
        drawn.append(tokens)
    assert drawn[0] != drawn[1]  # the adapters are applied at all


@pytest.mark.parametrize(
    "params",
    [
        DRAWN,
        replace(DRAWN, temperature=0.6),
        replace(DRAWN, temperature=1.7, top_k=5),
        replace(DRAWN, temperature=0.8, top_p=0.5),
    ],
)
def test_logprobs_are_tempered_over_the_whole_vocabulary(
    world: World, vllm: VllmSampler, params: SamplingParams
) -> None:
    outcome = run(
        vllm,
        x=sample(PROMPT, params, adapter_folder=world.folders["a"], topk_sample_logprobs=3, plain_logprobs=True),
        beside=sample([7] * 40, replace(params, temperature=1.3, max_tokens=3)),
        greedy=sample([8] * 3, GREEDY),
    )
    sequence = outcome.sequence("x")
    tokens = sequence.tokens.tolist()
    tempered = world.forced(PROMPT + tokens, "a", params.temperature)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(sequence.logprobs, tempered[np.arange(5), tokens], atol=2 * BOUND)
    assert sequence.topk is not None
    np.testing.assert_allclose(sequence.topk.logprobs, -np.sort(-tempered, axis=-1)[:, :3], atol=2 * BOUND)
    np.testing.assert_array_equal(sequence.topk.ids, np.argsort(-tempered, axis=-1)[:, :3])
    assert sequence.plain_logprobs is not None
    np.testing.assert_allclose(sequence.plain_logprobs, world.expected(PROMPT, tokens, "a"), atol=BOUND)
    if params.top_k > 0:
        ranks = (tempered > tempered[np.arange(5), tokens][:, None]).sum(-1)
        assert ranks.max() < params.top_k
    other = outcome.sequence("beside")
    np.testing.assert_allclose(
        other.logprobs, world.expected([7] * 40, other.tokens.tolist(), temperature=1.3), atol=2 * BOUND
    )


def test_prompt_scores_are_plain(world: World, vllm: VllmSampler) -> None:
    prompt = list(range(20, 60))
    outcome = run(
        vllm,
        scored=sample(prompt, replace(DRAWN, temperature=0.5, max_tokens=1), prompt_logprobs=True, num_samples=2),
        best=sample(prompt, topk_prompt_logprobs=4, adapter_folder=world.folders["b"], prompt_logprobs_last_n=3),
    )
    plain = world.forced(prompt)
    scores = outcome.result("scored").prompt_logprobs
    assert scores is not None
    assert np.isnan(scores[0])
    np.testing.assert_allclose(scores[1:], plain[np.arange(39), prompt[1:]], atol=BOUND)
    best = outcome.result("best")
    assert best.prompt_logprobs is not None
    assert best.topk_prompt_logprobs is not None
    adapted = world.forced(prompt, "b")
    assert np.isnan(best.prompt_logprobs[:37]).all()
    np.testing.assert_allclose(best.prompt_logprobs[37:], adapted[np.arange(36, 39), prompt[37:]], atol=BOUND)
    np.testing.assert_array_equal(best.topk_prompt_logprobs.ids[37:], np.argsort(-adapted[36:39], -1)[:, :4])
    assert np.isnan(best.topk_prompt_logprobs.logprobs[:37]).all()


def test_a_seed_repeats_and_samples_differ(world: World, vllm: VllmSampler) -> None:
    first = run(vllm, x=sample(PROMPT, DRAWN, num_samples=3))
    again = run(vllm, x=sample(PROMPT, DRAWN, num_samples=2), beside=sample([9] * 9, replace(DRAWN, seed=8)))
    drawn = [sequence.tokens.tolist() for sequence in first.result("x").sequences]
    assert [sequence.tokens.tolist() for sequence in again.result("x").sequences] == drawn[:2]
    assert drawn[0] != drawn[1]
    assert drawn[1] != drawn[2]


def test_stops_mean_what_they_mean_elsewhere(world: World, vllm: VllmSampler) -> None:
    free = run(vllm, x=sample(PROMPT, replace(GREEDY, max_tokens=8))).sequence("x").tokens.tolist()
    string = world.tokenizer.decode([free[2]])
    outcome = run(
        vllm,
        token=sample(PROMPT, replace(GREEDY, max_tokens=8, stop=(free[3],)), stream=True),
        string=sample(PROMPT, replace(GREEDY, max_tokens=8, stop=(string,))),
    )
    token = outcome.sequence("token")
    assert token.tokens.tolist() == free[: free.index(free[3]) + 1]
    assert token.stop_reason == "stop"
    text = world.tokenizer.decode(outcome.sequence("string").tokens.tolist())
    assert text.endswith(string)
    assert outcome.sequence("string").stop_reason == "stop"
    streamed = [t for delta in outcome.deltas["token"] for t in delta.tokens.tolist()]
    assert streamed == token.tokens.tolist()
    assert len(outcome.deltas["token"]) > 1
    assert "string" not in outcome.deltas


def test_prompts_share_what_was_computed_only_within_a_domain(vllm: VllmSampler) -> None:
    prompt = list(range(3, 243))  # longer than a block of the cache
    one = replace(GREEDY, max_tokens=1)
    assert run(vllm, x=sample(prompt, one, cache_domain="red")).result("x").prompt_cache_hit_tokens == 0
    assert run(vllm, x=sample(prompt, one, cache_domain="red")).result("x").prompt_cache_hit_tokens > 0
    assert run(vllm, x=sample(prompt, one, cache_domain="blue")).result("x").prompt_cache_hit_tokens == 0


def test_a_cancelled_request_leaves_the_others_alone(vllm: VllmSampler) -> None:
    vllm.add("gone", sample(PROMPT, replace(GREEDY, max_tokens=200)))
    vllm.add("stays", sample(PROMPT, replace(GREEDY, max_tokens=4)))
    vllm.step()
    vllm.cancel("gone")
    vllm.cancel("never there")
    assert vllm.load.active == 1
    assert vllm.load.rows == 1
    ended = {}
    while vllm.load.active:
        ended |= vllm.step().ended
    assert list(ended) == ["stays"]
    assert vllm.load.tokens == 0


def test_more_adapters_than_fit_are_swapped(world: World, vllm: VllmSampler) -> None:
    for name in ("a", "b", "c", "a"):
        sequence = run(vllm, x=sample(PROMPT, adapter_folder=world.folders[name])).sequence("x")
        expected = world.expected(PROMPT, sequence.tokens.tolist(), name)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=BOUND)


def test_adapters_that_come_while_others_draw_change_nobodys_numbers(world: World, vllm: VllmSampler) -> None:
    """Two slots, four users: two draw, others come, wait for a slot, and the last has none at all."""
    names: dict[str, str | None] = {"first": "a", "second": "b", "third": "c", "fourth": None, "fifth": "a"}
    ended: dict[str, object] = {}
    for request_id, name in names.items():
        folder = world.folders[name] if name else None
        vllm.add(request_id, sample(PROMPT, replace(GREEDY, max_tokens=12), adapter_folder=folder))
        ended |= vllm.step().ended
    while vllm.load.active:
        ended |= vllm.step().ended
    for request_id, name in names.items():
        result = ended[request_id]
        assert isinstance(result, SampleResult), result
        tokens = result.sequences[0].tokens.tolist()
        np.testing.assert_allclose(
            result.sequences[0].logprobs, world.expected(PROMPT, tokens, name), atol=BOUND, err_msg=request_id
        )


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (sample(PROMPT, prompt_alt_tokens_k=2), "prompt_alt_tokens_k"),
        (sample(PROMPT, target_prompt_logprobs=np.zeros((5, 1), np.int64)), "target_prompt_logprobs"),
        (sample(PROMPT, replace(GREEDY, temperature=0.005)), "sampling_params.temperature"),
        (sample(PROMPT, replace(GREEDY, max_tokens=1000)), "sampling_params.max_tokens"),
    ],
)
def test_what_vllm_cannot_do_exactly_is_refused_by_name(vllm: VllmSampler, request_: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vllm.add("x", request_)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert vllm.load.active == 0


@pytest.mark.parametrize(("name", "word"), [("head", "train_unembed"), ("wide", "rank 24")])
def test_adapters_that_vllm_cannot_apply_are_refused(world: World, vllm: VllmSampler, name: str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as caught:
        vllm.add("x", sample(PROMPT, adapter_folder=world.folders[name]))
    assert "torch" in (caught.value.hint or "")
    assert world.folders[name] not in caught.value.message


def test_an_adapter_that_vllm_refuses_fails_alone(world: World, vllm: VllmSampler) -> None:
    folder = world.folders["head"]
    vllm._adapters[folder] = 4711  # as if it had passed our own check
    try:
        outcome = run(vllm, bad=sample(PROMPT, adapter_folder=folder), good=sample(PROMPT))
    finally:
        del vllm._adapters[folder]
    assert isinstance(outcome.ended["bad"], InvalidRequest)
    assert folder not in outcome.ended["bad"].message
    assert outcome.sequence("good").tokens.shape == (5,)


def test_a_lost_process_gives_its_requests_up_and_the_next_one_starts_another(
    world: World, vllm_environment: VllmEnvironment
) -> None:
    sampler = VllmSampler(
        world.folder, world.info, world.tokenizer, python=vllm_environment.python, cache_bytes=64 << 20, threads=1
    )
    try:
        sampler.add("x", sample(PROMPT))
        assert sampler._process is not None
        sampler._process._process.kill()
        with pytest.raises(EngineFailure, match="ended in the middle of the work"):
            sampler.step()
        assert sampler.load.active == 0
        assert run(sampler, x=sample(PROMPT)).sequence("x").tokens.shape == (5,)
    finally:
        sampler.close()


def test_a_model_that_vllm_cannot_load_is_one_clear_line(
    world: World,
    vllm_environment: VllmEnvironment,
) -> None:
    with pytest.raises(Unavailable, match="vLLM cannot load the base model"):
        VllmSampler(
            world.folder,
            replace(world.info, context_length=100_000),
            world.tokenizer,
            python=vllm_environment.python,
            threads=1,
        )
