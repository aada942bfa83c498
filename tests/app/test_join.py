"""Copies of a sampling client get numbers of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.api import Api, serving


async def _sampler(api: Api, session: str, number: int = 0) -> str:
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": MODEL}
    return str((await api.post("create_sampling_session", **body)).json()["sampling_session_id"])


async def _join(api: Api, sampler: str) -> int:
    answer = await api.post("join_sampling_session", sampling_session_id=sampler)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["client_counter"])


async def test_numbers_are_unique_by_sampling_session_and_survive_a_restart(
    tiny_settings: Callable[..., Settings],
) -> None:
    settings = tiny_settings()
    async with serving(settings, ready=False) as api:
        session = await api.session()
        first, second = await _sampler(api, session), await _sampler(api, session, 1)
        assert sorted(await asyncio.gather(*(_join(api, first) for _ in range(20)))) == list(range(1, 21))
        assert await _join(api, second) == 1
    async with serving(settings, ready=False) as api:
        assert await _join(api, first) == 21


async def test_requests_of_clones_are_numbered_apart(api: Api) -> None:
    sampler = await _sampler(api, await api.session())
    body = {"sampling_session_id": sampler, "prompt": [5], "sampling_params": {"max_tokens": 1}}
    seq_ids = [0, await _join(api, sampler) * 10**9, 10**18, 2**63 - 1]
    promises = [await api.submit("asample", seq_id=seq_id, **body) for seq_id in seq_ids]
    assert len(set(promises)) == 4
    for promise, seq_id in zip(promises, seq_ids, strict=True):
        assert "sequences" in await api.result(promise)
        assert await api.submit("asample", seq_id=seq_id, **body) == promise
    assert (await api.post("asample", seq_id=2**63, **body)).status_code == 400


async def test_who_cannot_join(api: Api) -> None:
    session = await api.session()
    sampler = await _sampler(api, session)
    other = await api.other()
    assert (await other.post("join_sampling_session", sampling_session_id=sampler)).status_code == 404
    assert (await api.post("join_sampling_session", sampling_session_id="nobody:sample:0")).status_code == 404
    assert (await api.post("join_sampling_session")).status_code == 400
    assert await _join(api, sampler) == 1, "refusals use no number up"
    await api.client.post(f"sessions/{session}/finish", json={})
    answer = await api.post("join_sampling_session", sampling_session_id=sampler)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_ended")
