"""Exports: an adapter leaves the server as plain PEFT files, by addresses that are signed and expire."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pytest
from safetensors.torch import load

from tests.support.api import Api


async def exported(api: Api) -> tuple[str, dict[str, str]]:
    """A model that was exported once, and the addresses of its files."""
    model_id = await api.model()
    await api.train(model_id)
    result = await api.do("save_weights_external", model_id=model_id, seq_id=3, path="out", ttl_seconds=3600)
    assert result["path"] == f"tinker://{model_id}/external_weights/out"
    answer = await api.client.get(f"training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls")
    assert answer.status_code == 200, answer.text
    return model_id, answer.json()["urls"]


async def test_files_are_fetched_without_a_key_and_in_ranges(api: Api) -> None:
    _, urls = await exported(api)
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    async with api.edge.without_key() as client:
        whole = await client.get(urls["adapter_model.safetensors"])
        assert int(whole.headers["content-length"]) == len(whole.content)
        assert any(tensor.abs().sum() > 0 for name, tensor in load(whole.content).items() if "lora_B" in name)
        part = await client.get(urls["adapter_model.safetensors"], headers={"Range": "bytes=8-15"})
        assert (part.status_code, part.content) == (206, whole.content[8:16])
        beyond = await client.get(urls["adapter_model.safetensors"], headers={"Range": "bytes=999999999-"})
        assert (beyond.status_code, beyond.json()["error"]["code"]) == (416, "range_not_satisfiable")
        assert beyond.headers["content-range"] == f"bytes */{len(whole.content)}"
        broken = await client.get(urls["adapter_model.safetensors"], headers={"Range": "pages=1-2"})
        assert (broken.status_code, broken.json()["error"]["field"]) == (400, "Range")


@pytest.mark.parametrize(
    "tamper",
    [
        lambda url: url.replace("adapter_model.safetensors", "tinsmith.json"),
        lambda url: url.replace("adapter_model.safetensors", "..%2f..%2ftinsmith.db"),
        lambda url: url.replace("expires=", "expires=9"),
        lambda url: url[:-4] + "0000",
        lambda url: url.replace("/files/", "/files/0"),
    ],
)
async def test_an_altered_address_is_no_address(api: Api, tamper: Callable[[str], str]) -> None:
    _, urls = await exported(api)
    async with api.edge.without_key() as client:
        answer = await client.get(tamper(urls["adapter_model.safetensors"]))
    assert answer.status_code == 404
    assert str(api.edge.settings.data_dir) not in answer.text


async def test_an_address_ends_with_the_export(api: Api) -> None:
    model_id, urls = await exported(api)
    gone = await api.client.delete(f"training_runs/{model_id}/checkpoints/external_weights/out")
    assert gone.status_code == 204
    async with api.edge.without_key() as client:
        assert (await client.get(urls["adapter_config.json"])).status_code == 404


async def test_an_address_expires_within_the_hour(api: Api) -> None:
    _, urls = await exported(api)
    expires = int(parse_qs(urlsplit(urls["adapter_config.json"]).query)["expires"][0])
    assert 300 < expires - time.time() <= 3600
    signed = api.edge.app.state.services.exports._signed
    signed._clock = lambda: datetime.fromtimestamp(expires, tz=UTC)
    async with api.edge.without_key() as client:
        assert (await client.get(urls["adapter_config.json"])).status_code == 404


async def test_only_exports_have_addresses_and_exports_are_not_loaded_back(api: Api) -> None:
    model_id, _ = await exported(api)
    await api.do("save_weights", model_id=model_id, seq_id=4, path="kept")
    answer = await api.client.get(f"training_runs/{model_id}/checkpoints/weights/kept/external_weights_urls")
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "checkpoint_id"
    path = f"tinker://{model_id}/external_weights/out"
    load = await api.post("load_weights", model_id=model_id, seq_id=5, path=path, optimizer=False)
    assert (load.status_code, load.json()["error"]["field"]) == (400, "path")
    info = await api.post("weights_info", tinker_path=path)
    assert info.json()["lora_rank"] == 4
