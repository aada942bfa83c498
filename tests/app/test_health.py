"""Health, readiness, capabilities, and what clients read first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from app.settings import Settings
from schemas.errors import InvalidRequest
from tests.app.conftest import MODEL, Edge, IdleWorker, running
from tests.support.inline_group import InlineWorkerGroup


async def until_ready(edge: Edge) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            answer = await edge.without_key().get("readyz")
            if answer.status_code == 200:
                return dict(answer.json())
            await asyncio.sleep(0.02)
            edge.app.state.readiness._answer = None


async def test_healthz_at_both_places(edge: Edge) -> None:
    for url in ("http://localhost/healthz", "http://localhost/api/v1/healthz"):
        answer = await edge.without_key().get(url)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_readyz_follows_the_worker(make_settings: Callable[..., Settings]) -> None:
    release = asyncio.Event()
    groups: list[InlineWorkerGroup] = []

    class SlowGroup(InlineWorkerGroup):
        async def start(self) -> Any:
            await release.wait()
            return await super().start()

    def make(name: str, source: str | None) -> InlineWorkerGroup:
        groups.append(SlowGroup(lambda progress: IdleWorker()))
        return groups[-1]

    async with running(make_settings(), make) as edge:
        loading = await edge.without_key().get("http://localhost/readyz")
        assert loading.status_code == 503
        [model] = loading.json()["models"]
        assert (model["model_name"], model["state"]) == (MODEL, "starting")
        assert "loading" in model["detail"]
        release.set()
        assert (await until_ready(edge))["models"] == [{"model_name": MODEL, "state": "ready", "detail": None}]
        # A worker that does not answer is found out although the runtime believes in it.
        groups[0]._worker = None
        edge.app.state.readiness._answer = None
        silent = await edge.without_key().get("readyz")
        assert silent.status_code == 503
        assert "did not answer" in silent.json()["models"][0]["detail"]


async def test_readyz_says_why_a_model_failed(make_settings: Callable[..., Settings]) -> None:
    def broken(name: str, source: str | None) -> InlineWorkerGroup:
        def build(progress: Any) -> Any:
            raise InvalidRequest("the folder has no tokenizer", hint="add tokenizer.json")

        return InlineWorkerGroup(build)

    async with running(make_settings(restart_limit=0), broken) as edge:
        answer = await edge.without_key().get("readyz")
        async with asyncio.timeout(30):
            while answer.json()["models"][0]["state"] != "failed":
                await asyncio.sleep(0.01)
                edge.app.state.readiness._answer = None
                answer = await edge.without_key().get("readyz")
        assert answer.status_code == 503
        [model] = answer.json()["models"]
        assert model["state"] == "failed"
        assert "no tokenizer" in model["detail"]
        assert "tokenizer.json" in model["detail"]
        capabilities = (await edge.client.get("get_server_capabilities")).json()
        assert capabilities["supported_models"][0]["trainable"] is False


async def test_probes_are_shared(edge: Edge) -> None:
    await until_ready(edge)
    runtime = edge.app.state.services.models.runtimes[MODEL]
    probes = 0
    probe = runtime.probe

    async def counting(timeout: float) -> bool:  # noqa: ASYNC109 (the protocol's name)
        nonlocal probes
        probes += 1
        return bool(await probe(timeout))

    runtime.probe = counting
    edge.app.state.readiness._answer = None
    await asyncio.gather(*(edge.without_key().get("readyz") for _ in range(20)))
    assert probes == 1


async def test_capabilities(edge: Edge) -> None:
    await until_ready(edge)
    answer = (await edge.client.get("get_server_capabilities")).json()
    assert answer["supported_models"] == [
        {"model_name": MODEL, "max_context_length": 64, "trainable": True, "sampleable": True},
    ]
    assert answer["engine"]["name"] == "torch"
    assert answer["engine"]["optimizers"] == ["adamw", "dimuon"]
    assert answer["engine"]["several_ranks"] is False
    # What is this server's own under a name of the hosted service says so.
    assert [note.split()[0] for note in answer["notes"]] == ["stable_reinforce", "dimuon"]


async def test_client_config(make_settings: Callable[..., Settings]) -> None:
    async with running(make_settings(sample_max_concurrent_requests=7, max_body_mib=1)) as edge:
        config = (await edge.client.post("client/config", json={"sdk_version": "0.38.0"})).json()
        assert config["proto_compress_fwdbwd"] is True
        assert config["sample_max_concurrent_requests"] == 7
        assert config["pjwt_auth_enabled"] is False
        assert config["billing_exception_max_pause_duration_sec"] == 0
        assert config["fwdbwd_max_chunk_bytes_count"] == 512 * 1024
        assert None not in config.values()
        dynamic = (await edge.client.post("client/dynamic_config", json={"sdk_version": "0.38.0"})).json()
        assert dynamic["refresh_interval_sec"] >= 10
        assert None not in dynamic.values()


async def test_the_sdk_reads_the_config(edge: Edge) -> None:
    from tinker.types.client_config_response import ClientConfigResponse

    config = (await edge.client.post("client/config", json={"sdk_version": "0.38.0"})).json()
    read = ClientConfigResponse.model_validate(config)
    assert read.proto_compress_fwdbwd is True
    assert set(config) <= set(ClientConfigResponse.model_fields), "a flag that the SDK does not know"
