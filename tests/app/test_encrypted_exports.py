"""Exports that are encrypted to somebody's key: only that key opens them, and the plain files are nowhere."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pyrage
import pytest
from pyrage import ssh, x25519
from safetensors.torch import load

from app.services.age_encryption import encrypt_folder, parse_recipients
from tests.support.api import Api

FILES = {"adapter_config.json", "adapter_model.safetensors"}


def ssh_key(folder: Path, kind: str) -> tuple[str, Any]:
    """A public key as people paste it (with its comment), and the identity."""
    file = folder / kind
    command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "me@here", "-f", str(file)]
    subprocess.run(command, check=True, timeout=60)
    return file.with_suffix(".pub").read_text(), ssh.Identity.from_buffer(file.read_bytes())


async def export(api: Api, recipients: list[str], name: str = "out") -> tuple[str, dict[str, Any], dict[str, str]]:
    """A trained model, exported; the result of the export, and the addresses of its files."""
    model_id = await api.model()
    await api.train(model_id)
    result = await api.do(
        "save_weights_external", model_id=model_id, path=name, ttl_seconds=3600, age_encryption_recipients=recipients
    )
    answer = await api.client.get(f"training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls")
    return model_id, result, answer.json()["urls"]


async def fetch(api: Api, url: str) -> bytes:
    async with api.edge.without_key() as client:
        answer = await client.get(url)
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_every_recipient_opens_every_file(api: Api, tmp_path: Path) -> None:
    identity = x25519.Identity.generate()
    keys = [ssh_key(tmp_path, kind) for kind in ("ed25519", "rsa")]
    recipients = [str(identity.to_public()), *(public for public, _ in keys)]
    model_id, result, urls = await export(api, recipients)
    assert set(urls) == {f"{name}.age" for name in FILES}
    files = {name: await fetch(api, url) for name, url in urls.items()}
    assert result["size_bytes"] == sum(map(len, files.values()))
    for opener in (identity, *(private for _, private in keys)):
        config = json.loads(pyrage.decrypt(files["adapter_config.json.age"], [opener]))
        assert config["r"] == 4
        tensors = load(pyrage.decrypt(files["adapter_model.safetensors.age"], [opener]))
        assert any(tensor.abs().sum() > 0 for name, tensor in tensors.items() if "lora_B" in name)
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(files["adapter_config.json.age"], [x25519.Identity.generate()])
    listed = (await api.client.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
    assert [each["size_bytes"] for each in listed] == [result["size_bytes"]]


async def test_the_plain_files_are_neither_on_disk_nor_behind_an_address(api: Api) -> None:
    recipient = str(x25519.Identity.generate().to_public())
    _, _, urls = await export(api, [recipient])
    folders = list((api.edge.settings.data_dir / "checkpoints").iterdir())
    assert [{file.name for file in folder.iterdir()} for folder in folders] == [{f"{name}.age" for name in FILES}]
    services = api.edge.app.state.services
    signed = services.exports._signed
    checkpoint_id = next(iter(urls.values())).split("/files/")[1].split("/")[0]
    async with api.edge.without_key() as client:
        for name in FILES:
            genuine = signed.sign(checkpoint_id, name, signed.expiry())
            assert (await client.get(genuine.lstrip("/"))).status_code == 404


async def test_an_export_that_cannot_be_encrypted_leaves_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("app.services.age_encryption.encrypt_io", broken)
    model_id = await api.model()
    recipient = str(x25519.Identity.generate().to_public())
    outcome = await api.fails(
        "save_weights_external", model_id=model_id, path="x", age_encryption_recipients=[recipient]
    )
    assert outcome["category"] == "server"
    assert list((api.edge.settings.data_dir / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "bad",
    ["age1abc", "", "AGE-SECRET-KEY-1QQQ", "ssh-dss AAAAB3NzaC1kc3M=", "ssh-ed25519 AAAA", "ecdsa-sha2-nistp256 AAAA"],
)
async def test_a_recipient_that_is_none_is_named_but_not_quoted_and_the_next_request_goes_on(
    api: Api, bad: str
) -> None:
    model_id = await api.model()
    good = str(x25519.Identity.generate().to_public())
    body = {"model_id": model_id, "path": "x"}
    refused = await api.post("save_weights_external", seq_id=1, age_encryption_recipients=[good, bad], **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["field"] == "age_encryption_recipients[1]"
    for accepted in ("age1", "ssh-ed25519", "ssh-rsa"):
        assert accepted in refused.json()["detail"]
    assert not bad or bad not in refused.text
    await api.do("save_weights_external", seq_id=2, age_encryption_recipients=[], **body)


async def test_at_most_ten_recipients(api: Api) -> None:
    model_id = await api.model()
    many = [str(x25519.Identity.generate().to_public()) for _ in range(11)]
    refused = await api.post("save_weights_external", model_id=model_id, path="x", age_encryption_recipients=many)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "age_encryption_recipients")
    await api.do("save_weights_external", model_id=model_id, path="x", age_encryption_recipients=many[:10])


def test_encrypting_again_after_it_was_done_or_cut_short(tmp_path: Path) -> None:
    identity = x25519.Identity.generate()
    recipients = parse_recipients([f" {identity.to_public()}\n"])
    for name in ("a", "b", "tinsmith.json"):
        (tmp_path / name).write_text(f"content of {name}")
    (tmp_path / "a.age").write_bytes(b"cut short")
    size = encrypt_folder(tmp_path, ("a", "b"), recipients)
    assert encrypt_folder(tmp_path, ("a", "b"), recipients) == size
    assert {path.name for path in tmp_path.iterdir()} == {"a.age", "b.age"}
    for name in ("a", "b"):
        assert pyrage.decrypt((tmp_path / f"{name}.age").read_bytes(), [identity]) == f"content of {name}".encode()
