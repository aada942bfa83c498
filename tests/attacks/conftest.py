"""One application on a tiny model for a whole file of attacks, an attacker on it, and somebody who trains beside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.settings import Settings
from tests.app.conftest import Edge
from tests.attacks.catalogue.case import BASE_MODEL
from tests.attacks.sweep import Attacker, Honest, result, targets
from tests.support.api import Api, serving
from tests.support.sockets import listening
from tests.support.tiny_model import make_tiny_model


@dataclass(frozen=True)
class Attacked:
    """The application, whoever attacks it, and whoever trains on it at the same time."""

    api: Api
    attacker: Attacker
    honest: Honest

    @property
    def edge(self) -> Edge:
        """The application itself."""
        return self.api.edge

    async def result(self, route: str, **body: object) -> dict[str, Any]:
        """Submit a request of the attacker and wait for its outcome."""
        return await result(self.api.client, route, **body)

    @property
    def data_dir(self) -> Path:
        """Its data folder."""
        return self.api.edge.settings.data_dir


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real base model, made once."""
    import torch

    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attacked]:
    """One for all tests of a file."""
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("attacked") / "data",
        base_model=[f"{BASE_MODEL}={tiny_folder}"],
        shutdown_grace=1.0,
        poll_hold=5.0,
    )
    async with serving(settings) as api:
        other = await api.edge.other_project()
        key = api.edge.app.state.dev_key
        secrets = [key, other.headers["X-API-Key"], str(settings.data_dir), str(tiny_folder)]
        async with httpx.AsyncClient(transport=api.client._transport) as client:
            attacker = Attacker(client, "http://localhost", key, await targets(api.client), secrets)
            yield Attacked(api, attacker, await Honest.begin(other))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(attacked: Attacked) -> AsyncIterator[int]:
    """The same application behind a socket, as `tinsmith serve` puts it there."""
    async with listening(attacked.edge.app, server_header=False, proxy_headers=False) as number:
        yield number
