"""What one project prompts is not told to another: not by how many tokens were cached, and so not by the time either.

The cache of prompts is one per base model. Its keys hold the project, so a prompt of somebody else is as good as none.
"""

from __future__ import annotations

import pytest

from tests.attacks.catalogue.case import BASE_MODEL
from tests.attacks.conftest import Attacked
from tests.support.api import Api

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECRET = [7 + i % 90 for i in range(150)]
"""Longer than two blocks of the cache."""


async def _cached(api: Api, sampler: str) -> int:
    outcome = await api.do(
        "asample", sampling_session_id=sampler, prompt=SECRET, sampling_params={"max_tokens": 1, "seed": 1}
    )
    return int(outcome["prompt_cache_hit_tokens"])


async def _sampler(api: Api, **weights: str) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0, **weights}
    answer = await api.post("create_sampling_session", **body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["sampling_session_id"])


async def test_a_prompt_of_the_base_model(attacked: Attacked) -> None:
    mine, theirs = attacked.api, await attacked.api.other()
    one, other = await _sampler(mine, base_model=BASE_MODEL), await _sampler(theirs, base_model=BASE_MODEL)
    assert await _cached(mine, one) == 0
    assert await _cached(mine, one) == 128, "the cache works"
    assert await _cached(theirs, other) == 0, "another project's prompt is not there"
    assert await _cached(theirs, other) == 128


async def test_a_prompt_of_a_published_checkpoint(attacked: Attacked) -> None:
    mine, theirs = attacked.api, await attacked.api.other()
    path, run = attacked.attacker.targets.path, attacked.attacker.targets.model
    published = await mine.client.post(f"training_runs/{run}/checkpoints/weights/kept/publish")
    assert published.status_code == 204, published.text
    one, other = await _sampler(mine, model_path=path), await _sampler(theirs, model_path=path)
    assert await _cached(mine, one) == 0
    assert await _cached(mine, one) == 128
    assert await _cached(theirs, other) == 0


async def test_a_prompt_through_the_other_protocols(attacked: Attacked) -> None:
    body = {"model": BASE_MODEL, "prompt": "a secret " * 20, "max_tokens": 1}

    async def cached(api: Api) -> int:
        answer = await api.client.post("http://localhost/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    theirs = await attacked.api.other()
    assert [await cached(attacked.api), await cached(attacked.api)] == [0, 128]
    assert await cached(theirs) == 0
