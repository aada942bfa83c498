"""Whatever a client asks for, its line leaves the log in the end: every kind of scope, as the application writes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from store.forgetting import forget_operations
from store.operations import expire_results
from store.tables import Operation
from tests.app.conftest import MODEL
from tests.support.api import Api


async def _scopes(db: AsyncSession) -> list[str]:
    return sorted(scope.partition(":")[0] for scope in await db.scalars(select(Operation.scope)))


async def _as_of(api: Api, when: datetime) -> list[str]:
    """The kinds of scopes of what the log still has after a sweep at a time when everything of before is over."""
    store = api.edge.app.state.store
    await store.write(lambda db: expire_results(db, when, when))
    await store.write(lambda db: forget_operations(db, when))
    left: list[str] = await store.read(_scopes)
    return left


async def test_every_kind_of_line_is_forgotten(api: Api) -> None:
    for number in range(3):
        body = {"model": MODEL, "prompt": [5, 6, 7 + number], "max_tokens": 2}
        answer = await api.client.post("http://localhost/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    session = await api.session()
    model = await api.model(session)
    await api.train(model)
    path = (await api.do("save_weights", model_id=model, path="kept"))["path"]
    project = (await api.client.get("auth/apikey/me")).json()["project_id"]
    copied = await api.post("copy_weights", source_path=path, destination_project_id=project)
    assert copied.status_code == 200, copied.text
    sampler = await api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    await api.do(
        "asample",
        sampling_session_id=sampler.json()["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        sampling_params={"max_tokens": 2},
    )
    await api.do("unload_model", model_id=model)
    written = await api.edge.app.state.store.read(_scopes)
    assert set(written) == {"copy", "direct", "model", "sampler", "session", "unload"}
    later = datetime.now(UTC) + timedelta(days=400)
    assert set(await _as_of(api, later)) == {"direct", "model", "sampler", "session", "unload"}, "the session lives"
    assert (await api.post(f"sessions/{session}/finish")).status_code == 200
    assert await _as_of(api, later) == ["direct"], "the last of its project, which gives the next one its number"
