"""Downloads that end half-way, a hundred times: no descriptor, no temporary file, no hold on the folder stays."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import pytest

from tests.attacks.conftest import Attacked
from tests.attacks.sweep import footprint

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMES = 100


def _descriptors() -> list[str]:
    """What files of the data folder this process holds open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in found if "checkpoints" in name)


def _files(attacked: Attacked) -> list[str]:
    """Of the data folder, but for snapshots, which are written when their time comes."""
    return [name for name in footprint(attacked.data_dir)["files"] if not name.startswith("snapshots")]


async def _cut(port: int, address: str, after: int, headers: bytes = b"") -> None:
    """Ask, read so many bytes, and hang up the hard way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    writer.write(b"GET " + address.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
    await writer.drain()
    if after:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] in (b"200", b"206"), head
        await reader.readexactly(after)
    writer.transport.abort()


async def test_nothing_is_left_of_downloads_that_were_cut_off(attacked: Attacked, port: int) -> None:
    session = (await attacked.api.client.post("create_session", json={})).json()["session_id"]
    large = {"rank": 128, "seed": 1}
    body = {"session_id": session, "model_seq_id": 0, "base_model": "acme/tiny", "lora_config": large}
    run = (await attacked.result("create_model", **body))["model_id"]
    await attacked.result("save_weights_external", model_id=run, path="large")
    route = f"training_runs/{run}/checkpoints/external_weights/large"
    urls = (await attacked.api.client.get(f"{route}/external_weights_urls")).json()["urls"]
    archive = (await attacked.api.client.get(f"{route}/archive")).headers["location"]
    addresses = [url.partition("localhost")[2] for url in (urls["adapter_model.safetensors"], archive)]
    before, files = _descriptors(), _files(attacked)
    for number in range(TIMES):
        address = addresses[number % 2]
        ranged = b"Range: bytes=10-\r\n" if number % 4 == 2 else b""
        await _cut(port, address, (0, 1, 1000, 70_000)[number % 4], ranged)
    async with asyncio.timeout(20):
        while _descriptors() != before:  # noqa: ASYNC110 (the server notices in its own time)
            await asyncio.sleep(0.05)
    assert _files(attacked) == files
    whole = await attacked.edge.without_key().get(urls["adapter_model.safetensors"])
    assert (whole.status_code, len(whole.content)) == (200, int(whole.headers["content-length"]))
    folders = len(list((attacked.data_dir / "checkpoints").iterdir()))
    assert (await attacked.api.client.delete(route)).status_code == 204
    assert len(list((attacked.data_dir / "checkpoints").iterdir())) == folders - 1, "nobody holds the folder any more"


async def test_ranges_of_another_version_of_the_file_are_the_whole_file(attacked: Attacked) -> None:
    address = f"http://localhost{attacked.attacker.targets.export}"
    async with attacked.edge.without_key() as client:
        whole = await client.get(address)
        tag = whole.headers["etag"]
        for condition, status in ((tag, 206), ('"other"', 200), (f"W/{tag}", 200), ("nonsense\x0b", 200)):
            part = await client.get(address, headers={"Range": "bytes=0-9", "If-Range": condition})
            assert part.status_code == status, condition
            assert part.content == (whole.content[:10] if status == 206 else whole.content)
