"""Fetching the files of a checkpoint: whole, checked, and going on where an attempt before broke off.

What has arrived of NAME is in `NAME.part`, with what it is a part of in `NAME.part.json`; the file gets its name when
its checksum is right. Not responsible for which checkpoint, or for what is done with the files.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.commands.client import Server
from app.commands.output import fail, plain

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 6
PAUSE_SECONDS = 1.0
READ_SECONDS = 60.0
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TOTAL = re.compile(r"bytes (\d+)-\d+/(\d+)")

Progress = Callable[[str, int, int], None]
"""(file, bytes that are here, bytes in all)"""


RESUMES = "the same command again goes on where it broke off"
"""What to do when a file did not arrive and what is here of it stays."""


class Broken(Exception):
    """A connection ended early; what has arrived is kept."""


def fetch_files(
    server: Server, route: str, folder: Path, *, replace: bool = False, remedy: str = RESUMES
) -> list[dict[str, Any]]:
    """Fetch every file that `route` offers into `folder`; returns what it said of them.

    A file that is there already with the right checksum is left as it is. Ends the command (`typer.Exit`) if a file is
    there that is another one (unless `replace`), if the server stops answering, or if a checksum is wrong.

    Args:
        remedy: what a person is told to do if a file does not arrive: only the caller knows whether `folder` stays.
    """
    offered: list[dict[str, Any]] = server.get(route)["files"]
    for each in offered:
        if not _SAFE_NAME.fullmatch(each["name"]) or each["name"].endswith(".part"):
            raise fail(f"the server offers a file with the name {plain(each['name'])!r}", "nothing was fetched")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _shown(offered) as progress:
            for each in offered:
                _fetch(server, route, each, folder / each["name"], replace, remedy, progress)
    except OSError as error:
        raise fail(f"{folder} cannot be written ({error.strerror})", "choose another folder with --output") from None
    return offered


def _fetch(
    server: Server, route: str, offered: dict[str, Any], target: Path, replace: bool, remedy: str, progress: Progress
) -> None:
    if target.exists() and not replace:
        if _is_whole(target, offered):
            progress(offered["name"], offered["size_bytes"], offered["size_bytes"])
            return
        raise fail(f"{target} is there already, with another content", "choose another --output, or give --replace")
    part, note = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    address, failures, most = offered["url"], 0, part.stat().st_size if part.exists() else 0
    while True:
        try:
            _receive(address, offered, part, note, progress)
            break
        except Broken as error:
            here = part.stat().st_size if part.exists() else 0
            failures, most = (1, here) if here > most else (failures + 1, most)
            if failures >= ATTEMPTS:
                raise fail(f"{offered['name']} did not arrive: {error}", remedy) from None
            time.sleep(PAUSE_SECONDS * failures)
            address = next(
                each["url"] for each in server.get(route)["files"] if each["name"] == offered["name"]
            )  # the first address may have ended
    if not _is_whole(part, offered):
        part.unlink()
        note.unlink(missing_ok=True)
        raise fail(f"{offered['name']} does not have its checksum", "fetch it again; then see the server's log")
    part.replace(target)
    note.unlink(missing_ok=True)


def _receive(address: str, offered: dict[str, Any], part: Path, note: Path, progress: Progress) -> None:
    """Append to the part what is missing of it, or begin anew if it is of another file. Raises `Broken`."""
    import httpx

    have, tag = _kept(part, note, offered)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-", "If-Range": tag} if have and tag else {})
    if have and have == offered["size_bytes"]:
        return
    try:
        # Without the key: the address is the permission, and it may lead to another host.
        with httpx.stream("GET", address, headers=headers, timeout=READ_SECONDS) as answer:
            if answer.status_code == 416:
                part.unlink(missing_ok=True)
                raise Broken("the server does not have as much as arrived before")
            if answer.status_code not in (200, 206):
                raise Broken(f"the server answered {answer.status_code}")
            have = _begin(answer, have, part, note, offered)
            with part.open("ab") as file:
                for chunk in answer.iter_raw():  # as it comes: what is gathered first is lost if the connection breaks
                    have += len(chunk)
                    if have > offered["size_bytes"]:
                        break  # its checksum will be wrong
                    file.write(chunk)
                    progress(offered["name"], have, offered["size_bytes"])
    except httpx.HTTPError as error:
        raise Broken(f"the connection broke ({type(error).__name__})") from None
    if have < offered["size_bytes"]:
        raise Broken("the connection ended early")


def _begin(answer: httpx.Response, have: int, part: Path, note: Path, offered: dict[str, Any]) -> int:
    """How much of the file comes before what is sent now; a whole answer replaces what was here."""
    if answer.status_code == 206:
        found = _TOTAL.fullmatch(answer.headers.get("content-range", ""))
        if found is None or (int(found[1]), int(found[2])) != (have, offered["size_bytes"]):
            part.unlink(missing_ok=True)
            raise Broken("the server sent another part than was asked for")
        return have
    part.write_bytes(b"")
    about = {"etag": answer.headers.get("etag"), "size_bytes": offered["size_bytes"], "sha256": offered.get("sha256")}
    note.write_text(json.dumps(about), encoding="utf-8")
    return 0


def _kept(part: Path, note: Path, offered: dict[str, Any]) -> tuple[int, str | None]:
    """How much is here of this very file, and the ETag that it came under; (0, None) if it is not of this file."""
    try:
        about = json.loads(note.read_text(encoding="utf-8"))
        size = part.stat().st_size
        same = (about["size_bytes"], about["sha256"]) == (offered["size_bytes"], offered.get("sha256"))
    except (OSError, ValueError, KeyError, TypeError):
        return 0, None
    return (size, about.get("etag")) if same and size <= offered["size_bytes"] else (0, None)


def _is_whole(path: Path, offered: dict[str, Any]) -> bool:
    if path.stat().st_size != offered["size_bytes"]:
        return False
    with path.open("rb") as file:
        return offered.get("sha256") in (None, hashlib.file_digest(file, "sha256").hexdigest())


@contextmanager
def _shown(offered: list[dict[str, Any]]) -> Iterator[Progress]:
    """A bar for each file on stderr, if somebody is watching."""
    if not sys.stderr.isatty():
        yield lambda name, have, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {each["name"]: bars.add_task(each["name"], total=each["size_bytes"]) for each in offered}
        yield lambda name, have, total: bars.update(tasks[name], completed=have, total=total)
