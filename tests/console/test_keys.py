"""The page of keys, limits and usage, and what a limit does to the queue: as an owner, a member and a reader see it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.console.conftest import signed_in
from tests.console.test_pages import EVIL, go, heading
from tests.console.traffic import Client
from tests.support.server import RunningServer

pytestmark = pytest.mark.browser


@dataclass
class Project:
    """A project with the key of its owner, and what the operator does for it."""

    operator: Client
    url: str
    project_id: str
    key: str

    def limit(self, **values: Any) -> None:
        """Set limits of the project."""
        answer = self.operator.http.put(f"admin/projects/{self.project_id}/limits", json=values)
        assert answer.status_code == 200, answer.text

    def owner(self) -> Client:
        """A client program with the owner's key."""
        return Client.of(self.url, self.key)

    def new_key(self, name: str, role: str, **more: Any) -> str:
        """Another key, made by the owner."""
        return str(self.owner().post("keys", name=name, role=role, **more)["key"])


@pytest.fixture
def project(client: Client, server: RunningServer, request: pytest.FixtureRequest) -> Project:
    """A project of its own for each test."""
    made = client.post("admin/projects", name=request.node.name[:100])["project_id"]
    key = client.post(f"admin/projects/{made}/keys", name="the owner's", role="owner")["key"]
    return Project(client, server.url, made, key)


def row(page: Any, table: str, name: str) -> Any:
    """A row of a table, by the beginning of its text."""
    return page.get_by_role("region", name=table, exact=True).get_by_role("row", name=re.compile(f"^{name}"))


def test_an_owner_makes_rotates_and_revokes_a_key(context: Any, server: RunningServer, project: Project) -> None:
    page = signed_in(context, server, project.key)
    go(page, "keys?new_key=true&key_name=notebook")
    page.get_by_text("A client asks for a new key called notebook").wait_for()
    assert page.get_by_label("Name of a new key").input_value() == "notebook"
    roles = page.get_by_label("What it may do").locator("option").all_inner_texts()
    assert [role.split(":")[0] for role in roles] == ["read-only", "member", "owner"], "no more than one's own"
    page.get_by_label("It ends").select_option(label="in 30 days")
    page.get_by_text("Narrow it down").click()
    page.get_by_label("read", exact=True).check()
    page.get_by_label("sample", exact=True).check()
    page.get_by_role("button", name="Make a key").click()
    shown = page.get_by_role("status").filter(has_text="shown this once")
    first = shown.locator("code").inner_text()
    found = Client.of(server.url, first).http.get("auth/apikey/me").json()
    assert (found["name"], found["role"], found["permissions"]) == ("notebook", "member", ["read", "sample"])
    made = row(page, "Keys", "notebook")
    made.wait_for()
    text = made.inner_text()
    assert all(part in text for part in ("member", "only read, sample", "active", "in 30 days", first[:8]))
    page.get_by_role("button", name="I have kept it").click()
    assert first not in page.content(), "it is shown once"

    made.get_by_role("button", name="Rotate notebook").click()
    page.get_by_label("The old one ends").select_option(label="at once")
    page.get_by_role("button", name="Make the new key").click()
    shown.wait_for()
    second = shown.locator("code").inner_text()
    assert second != first
    assert [Client.of(server.url, second).http.get("limits").status_code, _status(server, first)] == [200, 401]
    page.get_by_label("Show the one that is over").check()
    page.get_by_role("region", name="Keys", exact=True).get_by_text("expired", exact=True).wait_for()

    page.get_by_role("button", name="Revoke notebook").click()
    page.get_by_role("dialog", name="Revoke this key?").get_by_role("button", name="Revoke the key").click()
    page.get_by_role("region", name="Keys", exact=True).get_by_text("revoked").wait_for()
    assert _status(server, second) == 401
    page.get_by_role("button", name="Revoke the owner's").click()
    dialog = page.get_by_role("dialog", name="Revoke this key?")
    assert "signed in with" in dialog.inner_text()
    dialog.get_by_role("button", name="Revoke the key").click()
    dialog.get_by_text("the last key that may manage").wait_for()


def _status(server: RunningServer, key: str) -> int:
    return httpx.get(f"{server.url}/api/v1/limits", headers={"X-API-Key": key}).status_code


def test_limits_say_who_set_them_and_what_is_left(context: Any, server: RunningServer, project: Project) -> None:
    owner = project.owner()
    project.limit(
        live_runs=4, training_tokens_per_second=50, training_tokens_burst=6000, checkpoint_bytes=80_000_000_000,
        training_token_budget="unlimited",
    )  # fmt: skip
    owner.run(owner.session("limited"))
    page = signed_in(context, server, project.key)
    go(page, "keys")
    runs = row(page, "Limits", "Live runs")
    runs.wait_for()
    _, value, source, used, left = (cell.strip() for cell in runs.inner_text().split("\t"))
    assert (value, left) == ("4", "3")
    assert source.startswith("the project")
    assert "set" in source
    assert used.endswith("1 of 4")
    assert float(runs.locator("meter").get_attribute("value")) == 0.25
    assert "at once 6,000" in row(page, "Limits", "Training tokens").inner_text()
    assert "80 GB" in row(page, "Limits", "Storage").inner_text()
    assert "none" in row(page, "Limits", "Training budget").inner_text()
    assert "the server, for every project" in row(page, "Limits", "Rank").inner_text()


@pytest.mark.parametrize("role", ["read-only", "member"])
def test_who_may_not_manage_keys_is_told_so(context: Any, server: RunningServer, project: Project, role: str) -> None:
    refused: list[str] = []
    context.on("response", lambda answer: refused.append(answer.url) if answer.status == 403 else None)
    page = signed_in(context, server, project.new_key("somebody", role))
    go(page, f"keys?new_key=true&key_name={EVIL}")
    page.get_by_text(f"its role is {role}. Ask somebody who has a key of role owner or admin").wait_for()
    page.get_by_text("This key may not make it").wait_for()
    row(page, "Limits", "Rank").wait_for()
    page.get_by_text("Nothing was used").wait_for()
    assert page.get_by_label("Name of a new key").count() == 0
    assert page.get_by_role("alert").count() == 0
    assert refused == [], "the page asks for nothing that this key may not have"
    assert page.locator("img[src=x]").count() == 0
    if role == "read-only":
        go(page, "playground")
        heading(page, "Playground")
        page.get_by_text("This key may not ask a model: its role is read-only").wait_for()
        prompt = page.get_by_label("Prompt")
        prompt.fill("Hello")
        assert page.get_by_role("button", name="Ask both").is_disabled()
        prompt.press("Control+Enter")
        go(page, "evaluate")
        page.get_by_text("This key may not score examples: its role is read-only").wait_for()
        assert page.get_by_role("button", name="Score them").is_disabled()
        assert refused == [], "nothing was asked of the server"
    else:
        go(page, "playground")
        page.get_by_label("Prompt").fill("Hello")
        assert page.get_by_role("button", name="Ask both").is_enabled()


def test_a_key_that_may_only_train_sees_which_parts_it_lacks(
    context: Any, server: RunningServer, project: Project
) -> None:
    page = context.new_page()
    page.goto(f"{server.url}/console/")
    page.get_by_label("API key").fill(project.new_key("trainer", "owner", scopes=["train"]))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("this key lacks the permission read").first.wait_for()
    go(page, "keys")
    page.get_by_text("it is narrowed to train, without the permission keys").wait_for()
    page.get_by_text("The usage is not shown: this key lacks the permission read").wait_for()
    row(page, "Limits", "Rank").wait_for()


def test_a_held_request_says_which_limit_holds_it(context: Any, server: RunningServer, project: Project) -> None:
    owner = project.owner()
    run = owner.run(owner.session("held"))
    datum = owner.tokens("The sky is", " blue.")
    size = len(datum["model_input"])
    project.limit(training_tokens_per_second=0.05, training_tokens_burst=size)
    for _ in range(2):
        owner.post("forward_backward", model_id=run, data=[datum], loss_fn="cross_entropy")
    page = signed_in(context, server, project.key)
    go(page, "queue")
    held = page.get_by_role("row", name=re.compile("forward and backward.*paused_rate_limit"))
    held.wait_for()
    table = page.get_by_role("region", name="Requests without a result")
    assert table.evaluate("it => it.scrollWidth <= it.clientWidth"), "nothing is cut off at the right"
    text = held.inner_text()
    assert "held back" in text
    assert re.search(r"limit training_tokens_per_second of this project is 0\.05; about .* more", text)
    assert "when its limit allows" in text, "what others took says nothing about this wait"
    go(page, f"training_runs/{run}")
    page.get_by_text(re.compile("training_tokens_per_second of this project is 0.05")).wait_for()
    page.locator(".now").get_by_role("link", name="The limits").click()
    limit = row(page, "Limits", "Training tokens")
    limit.wait_for()
    assert float(limit.locator("meter").get_attribute("value")) > 0.8
