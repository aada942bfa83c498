"""The application on a real (tiny) model in this process, driven as a client without an SDK would: JSON and polling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from app.settings import Settings
from schemas.roles import Role
from tests.app.conftest import MODEL, Edge, running
from tests.support.inline_group import InlineWorkerGroup
from workers.build import Progress, resolve_builder
from workers.group import WorkerGroup
from workers.spec import WorkerSpec

LOADING = threading.Lock()
"""transformers cannot load two models at once in one process; a server loads each in a process of its own. Held by a
test, no model is loaded."""

DATA = [
    {
        "model_input": [5, 6, 7, 8],
        "loss_fn_inputs": {"target_tokens": [6, 7, 8, 9], "weights": [1.0, 1.0, 1.0, 1.0]},
    }
]


def datum(*tokens: int, weight: float = 1.0) -> dict[str, Any]:
    """A cross-entropy example: each token predicts the next."""
    inputs, targets = list(tokens[:-1]), list(tokens[1:])
    return {
        "model_input": inputs,
        "loss_fn_inputs": {"target_tokens": targets, "weights": [weight] * len(targets)},
    }


@dataclass
class Groups:
    """A factory of inline groups that keeps what it made, so that a test can look inside or end a worker."""

    data_dir: Path
    made: list[InlineWorkerGroup] = field(default_factory=list)

    def __call__(self, name: str, source: str | None) -> WorkerGroup:
        spec = WorkerSpec(model=name, source=source, data_dir=str(self.data_dir), threads=1, dtype="float32")
        self.made.append(InlineWorkerGroup(lambda progress: _build(spec, progress)))
        return self.made[-1]


def _build(spec: WorkerSpec, progress: Progress) -> object:
    with LOADING:
        return resolve_builder(spec)(spec, progress)


@dataclass
class Api:
    """A client of the running application."""

    edge: Edge
    groups: Groups
    client: httpx.AsyncClient

    async def post(self, route: str, /, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return await self.client.post(route, json=body)

    async def submit(self, route: str, /, **body: Any) -> str:
        """POST a request that is accepted; returns its request id."""
        answer = await self.post(route, **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    async def result(self, request_id: str, seconds: float = 60) -> dict[str, Any]:
        """Poll until there is an outcome, and return it, whatever it is."""
        async with asyncio.timeout(seconds):
            while True:
                answer = await self.post("retrieve_future", request_id=request_id)
                if answer.status_code != 408:
                    assert answer.status_code == 200, answer.text
                    return dict(answer.json())
                # A poll that is not held comes back at once: without a pause this loop would keep the interpreter from
                # the worker, which is a thread of this process here.
                await asyncio.sleep(0.005)

    async def do(self, route: str, /, **body: Any) -> dict[str, Any]:
        """Submit and wait for a success."""
        outcome = await self.result(await self.submit(route, **body))
        assert "error" not in outcome, outcome
        return outcome

    async def fails(self, route: str, /, **body: Any) -> dict[str, Any]:
        """Submit and wait for a failure."""
        outcome = await self.result(await self.submit(route, **body))
        assert "error" in outcome, outcome
        return outcome

    async def session(self) -> str:
        """A new session."""
        answer = await self.post("create_session", sdk_version="test")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["session_id"])

    async def model(self, session_id: str | None = None, number: int = 0, **lora: Any) -> str:
        """A new model that is ready; rank 4 and seed 1 unless told otherwise."""
        outcome = await self.do(
            "create_model",
            session_id=session_id or await self.session(),
            model_seq_id=number,
            base_model=MODEL,
            lora_config={"rank": 4, "seed": 1, **lora},
        )
        return str(outcome["model_id"])

    async def train(self, model_id: str, *, steps: int = 1, lr: float = 1e-2, data: Any = None) -> None:
        """`steps` times forward_backward and optim_step, unnumbered."""
        for _ in range(steps):
            await self.do("forward_backward", model_id=model_id, data=data or DATA, loss_fn="cross_entropy")
            await self.do("optim_step", model_id=model_id, adam_params={"learning_rate": lr})

    async def scores(self, model_id: str, data: Any = None) -> list[list[float]]:
        """The logprobs of a batch under a model's present weights."""
        outcome = await self.do("forward", model_id=model_id, data=data or DATA, loss_fn="cross_entropy")
        return [output["logprobs"]["data"] for output in outcome["loss_fn_outputs"]]

    async def other(self, role: Role = "member") -> Api:
        """A client of another project."""
        return Api(self.edge, self.groups, await self.edge.other_project(role=role))

    async def folders(self, count: int) -> list[Path]:
        """The folders of checkpoints, as soon as there are so many: some are removed after an outcome is told."""
        deadline = asyncio.get_running_loop().time() + 30
        while len(found := list((self.edge.settings.data_dir / "checkpoints").iterdir())) != count:
            assert asyncio.get_running_loop().time() < deadline, found
            await asyncio.sleep(0.005)
        return found

    async def ready(self, seconds: float = 60) -> None:
        """Wait until every base model is loaded. Not by `readyz`, which gives an answer again for a second."""
        runtimes = self.edge.app.state.services.models.runtimes.values()
        async with asyncio.timeout(seconds):
            while any(runtime.state != "ready" for runtime in runtimes):  # noqa: ASYNC110 (a test, not the product)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(settings: Settings, *, ready: bool = True) -> AsyncIterator[Api]:
    """The application with these settings; by default its base model is loaded before the test goes on."""
    groups = Groups(settings.data_dir)
    async with running(settings, groups) as edge:
        running_api = Api(edge, groups, edge.client)
        if ready:
            await running_api.ready()
        yield running_api
