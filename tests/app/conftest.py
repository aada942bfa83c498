"""The real application on a real store, with a worker that only loads: what the edge itself does, in milliseconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.main import create_app
from app.settings import Settings
from schemas.base_model_info import BaseModelInfo
from schemas.roles import Role
from store.keys import create_key, ensure_project
from tests.support.inline_group import InlineWorkerGroup

BASE = "http://localhost/api/v1/"
MODEL = "acme/tiny"


class IdleWorker:
    """A worker that has loaded and is asked for nothing."""

    info = BaseModelInfo(
        vocab_size=128,
        context_length=64,
        dtype="float32",
        num_layers=2,
        parameters=1000,
        eos_token_ids=(2,),
        adapter_families=frozenset({"attn", "mlp", "unembed"}),
    )


def idle_group(name: str, source: str | None) -> InlineWorkerGroup:
    """A group whose worker is ready at once."""
    return InlineWorkerGroup(lambda progress: IdleWorker())


@dataclass(frozen=True)
class Edge:
    """The running application, and a client with the development key."""

    app: FastAPI
    client: httpx.AsyncClient
    settings: Settings

    def without_key(self) -> httpx.AsyncClient:
        """A client that sends no key."""
        return httpx.AsyncClient(transport=self.client._transport, base_url=BASE)

    async def other_project(self, name: str = "other", role: Role = "member") -> httpx.AsyncClient:
        """A client of another tenant."""
        return self.with_key(await self.new_key(name, role))

    async def new_key(self, project: str, role: Role, **rights: Any) -> str:
        """A key of a project, which is made if there is none of this name."""

        async def make(db: Any) -> str:
            project_id = await ensure_project(db, project)
            return (await create_key(db, project_id, "key", role=role, **rights))[1]

        return str(await self.app.state.store.write(make))

    def with_key(self, key: str) -> httpx.AsyncClient:
        """A client that sends this key."""
        return httpx.AsyncClient(transport=self.client._transport, base_url=BASE, headers={"X-API-Key": key})

    async def new_session(self, **fields: Any) -> str:
        """A fresh session of the development project."""
        answer = await self.client.post("create_session", json={"sdk_version": "test", **fields})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["session_id"])


@asynccontextmanager
async def running(settings: Settings, group_factory: Any = idle_group) -> AsyncIterator[Edge]:
    """The application with its lifespan, in this event loop."""
    app = create_app(settings, group_factory=group_factory)
    async with app.router.lifespan_context(app):
        headers = {"X-API-Key": app.state.dev_key}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers) as client:
            yield Edge(app, client, settings)


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings on a temporary data folder."""

    def make(**values: Any) -> Settings:
        fixed = {"data_dir": tmp_path / "data", "base_model": [f"{MODEL}=/nowhere"], "shutdown_grace": 1.0}
        return Settings(**{**fixed, **values})

    return make


@pytest.fixture
async def edge(make_settings: Callable[..., Settings]) -> AsyncIterator[Edge]:
    """The application with default limits."""
    async with running(make_settings()) as edge:
        yield edge


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real base model, made once: two layers, 259 tokens, 256 positions."""
    import torch

    from tests.support.tiny_model import make_tiny_model

    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def tiny_settings(make_settings: Callable[..., Settings], tiny_folder: Path) -> Callable[..., Settings]:
    """Settings that serve the tiny model."""

    def make(**values: Any) -> Settings:
        return make_settings(**{"base_model": [f"{MODEL}={tiny_folder}"], "poll_hold": 5.0, **values})

    return make


@pytest.fixture
async def api(tiny_settings: Callable[..., Settings]) -> AsyncIterator[Any]:
    """The application on the tiny model, and a client of it (`tests.support.api.Api`)."""
    from tests.support.api import serving

    async with serving(tiny_settings()) as client:
        yield client
