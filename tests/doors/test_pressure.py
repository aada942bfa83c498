"""What a door answers when the server cannot take a sample now, and what becomes of one whose server ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.services.paths import direct_scope
from app.settings import Settings
from schemas.operations import Sample, SamplingParams
from store import operations as log
from store.database import Store
from store.keys import ensure_project
from store.records import NewOperation
from tests.support.api import LOADING, Api, serving
from tests.support.tiny_model import make_tiny_model

MODEL = "acme/tiny"
CHAT = [{"role": "user", "content": "Hi"}]
OPENAI = ("http://localhost/v1/completions", {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 4})
ANTHROPIC = ("http://localhost/v1/messages", {"model": MODEL, "messages": CHAT, "max_tokens": 4})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def settings(tmp_path: Path, folder: Path) -> Callable[..., Settings]:
    def make(**values: Any) -> Settings:
        fixed = {"data_dir": tmp_path / "data", "base_model": [f"{MODEL}={folder}"], "shutdown_grace": 1.0}
        return Settings(**{**fixed, **values})

    return make


async def _ask(api: Api, which: tuple[str, dict[str, Any]], **change: Any) -> httpx.Response:
    return await api.client.post(which[0], json={**which[1], **change})


async def test_too_many_waiting_samples_are_sent_away_and_none_of_them_stays(settings: Callable[..., Settings]) -> None:
    async with serving(settings(max_waiting_samples=1)) as api:
        answer = await _ask(api, OPENAI)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")
        streamed = await _ask(api, OPENAI, stream=True)
        assert streamed.status_code == 429, "before the stream begins"
        assert (await _ask(api, OPENAI, prompt="a")).status_code == 200
        pending = await api.edge.app.state.store.read(log.unfinished)
        assert pending == []


async def test_a_model_that_is_loading_asks_to_come_back(settings: Callable[..., Settings]) -> None:
    async with AsyncExitStack() as served:
        with LOADING:
            api = await served.enter_async_context(serving(settings(), ready=False))
            answers = [await _ask(api, which) for which in (OPENAI, ANTHROPIC)]
        await api.ready()
    for answer, kind in zip(answers, ("server_error", "overloaded_error"), strict=True):
        assert answer.status_code == 503, answer.text
        assert answer.headers["Retry-After"]
        assert answer.json()["error"]["type"] == kind


async def test_a_sample_whose_connection_ended_with_the_server_does_not_run_again(
    settings: Callable[..., Settings],
) -> None:
    from app.codec import encode_operation

    made = settings()
    store = await Store.open(made.data_dir)
    import numpy as np

    body = encode_operation("sample", Sample(np.array([5, 6], np.int64), SamplingParams(max_tokens=4)))

    async def append(db: Any) -> None:
        project_id = await ensure_project(db, "left")
        new = NewOperation(
            request_id="left-over",
            project_id=project_id,
            kind="sample",
            scope=direct_scope(project_id),
            seq_id=1,
            digest="",
            body=body,
            created_at=datetime.now(UTC),
            checkpoint_id=None,
        )
        await log.append(db, new)

    await store.write(append)
    await store.close()
    async with serving(made) as api:
        assert await api.edge.app.state.store.read(log.unfinished) == []
        project_id = await api.edge.app.state.store.write(lambda db: ensure_project(db, "left"))
        record = await api.edge.app.state.store.read(lambda db: log.get_operation(db, project_id, "left-over"))
    assert record is not None
    assert record.error is not None
    assert (record.state, record.error.code) == ("failed", "cancelled")
