"""Downloads of checkpoints that are deleted or damaged meanwhile: whole, or a clear failure, never wrong bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.api import Api


async def _exported(api: Api) -> tuple[str, dict[str, str]]:
    """The route of an export of some hundred kilobytes, and addresses by name; `archive.tar` is one of them."""
    model = await api.model(rank=64)
    await api.train(model)
    await api.do("save_weights_external", model_id=model, path="e")
    route = f"training_runs/{model}/checkpoints/external_weights/e"
    urls = dict((await api.client.get(f"{route}/external_weights_urls")).json()["urls"])
    urls["archive.tar"] = (await api.client.get(f"{route}/archive")).headers["location"]
    return route, urls


async def _fetch(api: Api, url: str, after: int, meanwhile: Callable[[], Any]) -> tuple[dict[str, int], bytes]:
    """GET at the level of messages; `meanwhile` is awaited after so many of them were sent to the client."""
    parts = urlsplit(url)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    sent: list[dict[str, Any]] = []
    request = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if request:
            return request.pop()
        await asyncio.sleep(3600)
        raise AssertionError("the client stays")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) == after:
            await meanwhile()

    await api.edge.app(scope, receive, send)  # type: ignore[arg-type]
    [length] = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
    return {"status": sent[0]["status"], "length": length}, b"".join(each.get("body", b"") for each in sent[1:])


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "archive.tar"])
async def test_a_download_that_has_begun_arrives_whole_though_its_checkpoint_is_deleted(api: Api, name: str) -> None:
    route, urls = await _exported(api)
    async with api.edge.without_key() as client:
        expected = (await client.get(urls[name])).content
    assert len(expected) > 100_000

    async def delete() -> None:
        assert (await api.client.delete(route)).status_code == 204

    head, body = await _fetch(api, urls[name], 2, delete)  # after the first piece
    assert (head["status"], head["length"]) == (200, len(expected))
    assert body == expected
    await api.folders(0)
    async with api.edge.without_key() as client:
        assert (await client.get(urls[name])).status_code == 404


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json", "tinsmith.json"])
async def test_damaged_files_are_not_sent(api: Api, file: str) -> None:
    _, urls = await _exported(api)
    [folder] = (api.edge.settings.data_dir / "checkpoints").iterdir()
    _flip(folder / file)
    async with api.edge.without_key() as client:
        answer = await client.get(urls["archive.tar"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "damaged_checkpoint")
    assert file in answer.json()["detail"]
    assert str(api.edge.settings.data_dir) not in answer.text


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x80
    file.write_bytes(data)
