"""Archives: all files of an adapter as one tar, by an address that needs no key. What clients before 0.26 download."""

from __future__ import annotations

import io
import json
import tarfile
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import pytest
from pyrage import x25519

from app.services.archives import TarStream
from tests.support.api import Api

ADAPTER = ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]


async def address(api: Api, run: str, checkpoint: str, **query: str) -> httpx.Response:
    route = f"training_runs/{run}/checkpoints/{checkpoint}/archive"
    return await api.client.get(route, params=query, follow_redirects=False)


async def test_the_archive_of_each_kind_holds_the_adapter_and_nothing_of_the_servers_own(api: Api) -> None:
    model = await api.model()
    recipient = str(x25519.Identity.generate().to_public())
    await api.do("save_weights", model_id=model, path="x")
    await api.do("save_weights_for_sampler", model_id=model, path="x")
    await api.do("save_weights_external", model_id=model, path="x", age_encryption_recipients=[recipient])
    sealed = ["adapter_config.json.age", "adapter_model.safetensors.age", "checkpoint_complete"]
    for segment, names in (("weights", ADAPTER), ("sampler_weights", ADAPTER), ("external_weights", sealed)):
        redirect = await address(api, model, f"{segment}/x")
        assert redirect.status_code == 302
        url = redirect.headers["location"]
        expires = int(parse_qs(urlsplit(url).query)["expires"][0])
        assert parsedate_to_datetime(redirect.headers["expires"]).timestamp() == expires
        async with api.edge.without_key() as client:
            answer = await client.get(url)
        assert int(answer.headers["content-length"]) == len(answer.content)
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            assert tar.getnames() == names
            assert all(member.isfile() and member.mode == 0o644 for member in tar.getmembers())
            if segment != "external_weights":
                config = tar.extractfile("adapter_config.json")
                assert config is not None
                assert json.load(config)["r"] == 4


@pytest.mark.parametrize("name", ["weights/x", "weights%2Fx"])
async def test_a_relative_address_leads_back_by_the_way_that_was_taken(api: Api, name: str) -> None:
    model = await api.model()
    await api.do("save_weights", model_id=model, path="x")
    answer = await address(api, model, name, relative="true")
    asked, location = str(answer.request.url), answer.headers["location"]
    behind = asked.replace("/api/v1/", "/prefix/api/v1/")
    assert urljoin(behind, location).startswith(f"{behind.partition('training_runs')[0]}files/")
    async with api.edge.without_key() as client:
        assert (await client.get(urljoin(asked, location))).headers["content-type"] == "application/x-tar"


async def test_an_archive_ends_with_its_checkpoint_and_belongs_to_its_project(api: Api) -> None:
    model = await api.model()
    await api.do("save_weights", model_id=model, path="x")
    assert (await address(await api.other(), model, "weights/x")).status_code == 404
    assert (await address(api, model, "weights/none")).status_code == 404
    url = (await address(api, model, "weights/x")).headers["location"]
    async with api.edge.without_key() as client:
        assert (await client.get(url.replace("archive.tar", "tinsmith.json"))).status_code == 404
        assert (await client.get(url.replace("archive.tar", "optimizer.safetensors"))).status_code == 404
        await api.client.delete(f"training_runs/{model}/checkpoints/weights/x")
        assert (await client.get(url)).status_code == 404


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 300_000])
def test_its_size_is_known_before_its_bytes_and_deletion_does_not_cut_it(tmp_path: Path, size: int) -> None:
    file = tmp_path / "a"
    file.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    content = file.read_bytes()
    stream = TarStream({"a": file}, datetime(2026, 1, 2, tzinfo=UTC))
    file.unlink()
    data = b"".join(stream)
    assert len(data) == stream.size
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        member = tar.extractfile("a")
        assert member is not None
        assert member.read() == content
