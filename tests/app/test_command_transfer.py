"""Downloads: whole and checked, going on where they broke off, and never a file that the server did not announce."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import typer

from app.commands import transfer
from app.commands.client import Server
from app.commands.export import Format, write_export
from app.commands.transfer import fetch_files
from tests.support.scripted_server import reply, scripted

CONTENT = bytes(range(256)) * 400
ROUTE = "training_runs/r/checkpoints/weights/w/files"
KEY = "tml-" + "k" * 43


@dataclass
class Files:
    """A server of one file. `cut`: how many bytes each answer may have; the connection then breaks."""

    name: str = "adapter_model.safetensors"
    content: bytes = CONTENT
    sha256: str = hashlib.sha256(CONTENT).hexdigest()
    etag: str = '"one"'
    cut: int | None = None
    url: str = ""
    asked: list[tuple[str | None, str | None]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        if not handler.path.startswith("/file"):
            offered = {"name": self.name, "url": f"{self.url}/file", "size_bytes": len(CONTENT), "sha256": self.sha256}
            reply(handler, 200, json.dumps({"files": [offered], "expires": "2026-07-13T00:00:00Z"}).encode())
            return
        wanted, tag = handler.headers.get("Range"), handler.headers.get("If-Range")
        self.asked.append((wanted, tag))
        self.keys.append(handler.headers.get("X-API-Key"))
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and tag == self.etag else 0  # type: ignore[index]
        part = self.content[start:]
        handler.send_response(206 if start else 200)
        handler.send_header("ETag", self.etag)
        handler.send_header("Content-Length", str(len(part)))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        handler.end_headers()
        handler.wfile.write(part[: self.cut])
        handler.close_connection = True


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setattr(transfer, "PAUSE_SECONDS", 0.001)
    script = Files()
    with scripted(script) as script.url:
        yield script


def fetch(files: Files, folder: Path, **options: Any) -> None:
    fetch_files(Server(files.url, KEY), ROUTE, folder, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_broken_download_goes_on_where_it_broke_off(files: Files, tmp_path: Path) -> None:
    files.cut = 30_000
    fetch(files, tmp_path)
    assert (tmp_path / files.name).read_bytes() == CONTENT
    assert names(tmp_path) == [files.name]
    assert files.asked == [(None, None), *((f"bytes={at}-", '"one"') for at in (30_000, 60_000, 90_000))]
    assert set(files.keys) == {None}  # the address is the permission
    fetch(files, tmp_path)
    assert len(files.asked) == 4  # it is there already


def test_the_next_command_goes_on_and_begins_anew_if_the_file_is_another(files: Files, tmp_path: Path) -> None:
    part = tmp_path / f"{files.name}.part"
    files.cut = 0
    part.write_bytes(CONTENT[:1000])
    about = {"etag": '"one"', "size_bytes": len(CONTENT), "sha256": files.sha256}
    (tmp_path / f"{files.name}.part.json").write_text(json.dumps(about))
    with pytest.raises(typer.Exit):
        fetch(files, tmp_path)
    assert part.read_bytes() == CONTENT[:1000]
    assert set(files.asked) == {("bytes=1000-", '"one"')}
    files.etag, files.cut = '"two"', None  # the server has other bytes now: it sends all of them
    fetch(files, tmp_path)
    assert (tmp_path / files.name).read_bytes() == CONTENT
    part.write_bytes(b"of something else")
    (tmp_path / files.name).unlink()
    files.asked.clear()
    fetch(files, tmp_path)
    assert files.asked == [(None, None)]
    assert names(tmp_path) == [files.name]


def test_what_to_do_about_a_transfer_that_broke_is_true(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.cut = 0
    with pytest.raises(typer.Exit):
        fetch(files, tmp_path / "download")
    assert "the same command again goes on" in capsys.readouterr().err
    about = {"tinker_path": "tinker://r/weights/w", "base_model": "acme/tiny"}
    with pytest.raises(typer.Exit):
        write_export(
            Server(files.url, KEY), about, ROUTE.removesuffix("/files"), tmp_path / "out", Format.peft, None, None, None
        )
    said = capsys.readouterr().err
    assert names(tmp_path) == ["download"], "nothing of the export is kept"
    assert "nothing of it was kept" in said
    assert "`tinsmith checkpoints download`" in said


def test_wrong_bytes_are_no_file(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.content = bytes(len(CONTENT))
    with pytest.raises(typer.Exit):
        fetch(files, tmp_path)
    assert "checksum" in capsys.readouterr().err
    assert names(tmp_path) == []
    files.content = CONTENT + b"more"
    with pytest.raises(typer.Exit):
        fetch(files, tmp_path)
    assert files.name not in names(tmp_path)


def test_another_file_of_the_name_is_kept_unless_asked(files: Files, tmp_path: Path) -> None:
    (tmp_path / files.name).write_text("mine")
    with pytest.raises(typer.Exit):
        fetch(files, tmp_path)
    assert (tmp_path / files.name).read_text() == "mine"
    fetch(files, tmp_path, replace=True)
    assert (tmp_path / files.name).read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", ".hidden", "a\x1b[2J", "", "x.part", "a/b"])
def test_names_that_lead_elsewhere_are_refused(files: Files, tmp_path: Path, name: str) -> None:
    files.name = name
    with pytest.raises(typer.Exit):
        fetch(files, tmp_path / "in")
    assert files.asked == []
    assert not (tmp_path / "in").exists()
