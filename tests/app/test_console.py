"""The console's files: public, with a policy that lets nothing foreign run, and reachable by the SDK's addresses."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import httpx

from app.routes.console import FOLDER, POLICY
from tests.app.conftest import Edge

SERVED = sorted(path for path in FOLDER.rglob("*") if path.is_file())
OWN = [path for path in SERVED if path.suffix in (".js", ".html", ".css") and "vendor" not in path.parts]


def own_texts(suffix: str) -> list[tuple[Path, str]]:
    """Our own files of a kind."""
    return [(path, path.read_text()) for path in OWN if path.suffix == suffix]


async def test_every_file_is_public_with_a_strict_policy(edge: Edge) -> None:
    client = edge.without_key()
    for path in SERVED:
        if path.name != "index.html":
            answer = await client.get(f"http://localhost/console/{path.relative_to(FOLDER)}")
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == POLICY
            if path.suffix == ".js":
                assert "javascript" in answer.headers["content-type"], "nosniff: a script of another type does not run"
    index = await client.get("http://localhost/console/")
    assert index.headers["content-type"].startswith("text/html")
    assert index.headers["content-security-policy"] == POLICY
    again = await client.get("http://localhost/console/", headers={"If-None-Match": index.headers["etag"]})
    assert again.status_code == 304


ADDRESSES = {
    "/": "",
    "/console": "",
    "/sessions": "#/sessions",
    "/sessions/abc": "#/sessions/abc",
    "/training_runs/abc:train:0": "#/training_runs/abc:train:0",
    "/checkpoints/abc%3Atrain%3A0/weights%2Fx": "#/checkpoints/abc:train:0/weights/x",
    "/keys?new_key=true&key_name=a": "#/keys?new_key=true&key_name=a",
    "/keys/12": "#/keys/12",
    "/playground?mode=checkpoint&checkpoint=a%3A": "#/playground?mode=checkpoint&checkpoint=a%3A",
    "/console/training_runs/abc:train:0": "#/training_runs/abc:train:0",
    "/console/playground?a=b": "#/playground?a=b",
    "/sessions/%0dX:%20y": "#/sessions/%0DX:%20y",
    "/sessions/%22%3E%3Cscript%3E": "#/sessions/%22%3E%3Cscript%3E",
}
"""What other programs call our pages, the SDK among them, and where in the console they are."""


async def test_addresses_of_pages_lead_into_the_console(edge: Edge) -> None:
    client = edge.without_key()
    for address, page in ADDRESSES.items():
        answer = await client.get(f"http://localhost{address}")
        assert answer.status_code == 307, address
        led = urljoin(f"http://localhost{address}", answer.headers["location"])
        assert led == f"http://localhost/console/{page}"


async def test_nothing_but_its_files_is_there(edge: Edge) -> None:
    client = edge.without_key()
    for path in ("nothing.js", "../auth.py", "%2e%2e/%2e%2e/auth.py", "vendor", "vendor/", "\x00", "..%5cauth.py"):
        answer = await client.send(httpx.Request("GET", f"http://localhost/console/{path}".replace("\x00", "%00")))
        assert answer.status_code in (401, 404), path
        assert "principal" not in answer.text
    assert (await client.post("http://localhost/console/app.js")).status_code == 405


async def test_a_session_tells_where_to_watch_it(edge: Edge) -> None:
    answer = (await edge.client.post("create_session", json={})).json()
    address = answer["info_message"].split()[-1]
    assert address == f"http://localhost/console/#/sessions/{answer['session_id']}"


def test_no_text_can_become_markup_and_no_address_is_foreign() -> None:
    assert len(OWN) > 10
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|\beval\(|new Function"
    for path, text in own_texts(".js"):
        assert not re.search(forbidden, text), path
    for path in OWN:
        foreign = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", path.read_text())
        assert not foreign, path
    [(_, page)] = own_texts(".html")
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=", page), "the policy would refuse it"
