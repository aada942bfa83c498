"""Whoever uses the console: with the keyboard alone, in the dark, with assistive technology, on a narrow screen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.console.conftest import signed_in
from tests.console.test_pages import go, heading
from tests.console.traffic import Client
from tests.support.server import RunningServer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def made(client: Client) -> dict[str, str]:
    """Addresses of all pages, with something on each."""
    session = client.session("pages", purpose="looking")
    runs = [client.run(session, number, note="x") for number in (0, 1)]
    data = [client.tokens("ab", "cd")]
    for run in runs:
        for _ in range(5):
            client.step(run, data, 1e-3)
    client.save(runs[0], "one")
    client.outcome(client.post("optim_step", model_id=runs[1], adam_params={"eps": 1e-40})["request_id"])
    client.post("optim_step", model_id=runs[1], seq_id=500, adam_params={"learning_rate": 1e-3})
    return {
        "Runs": "training_runs",
        "Run": f"training_runs/{runs[1]}",
        "Compare": f"compare?runs={','.join(runs)}",
        "Queue": "queue",
        "Sessions": "sessions",
        "Session": f"sessions/{session}",
        "Checkpoints": "checkpoints",
        "Checkpoint": f"checkpoints/{runs[0]}/sampler_weights/one",
        "Playground": "playground",
        "Evaluation": "evaluate",
        "Keys": "keys",
        "Audit": "audit",
        "System": "system",
    }


def serious(page: Any, axe: str) -> list[str]:
    """What axe finds wrong that keeps people out."""
    if not page.evaluate("'axe' in window"):  # it stays while only the part behind the # changes
        page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html'][:160]} ({node['failureSummary'][:200]})"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_keeps_anybody_out(
    browser: Any, server: RunningServer, made: dict[str, str], axe: str, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": 1360, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{server.url}/console/")
    page.get_by_label("API key").wait_for()
    problems = {"Sign in": serious(page, axe)}
    page = signed_in(context, server)
    for name, path in made.items():
        go(page, path)
        page.locator(".loading").wait_for(state="detached")
        page.wait_for_timeout(300)
        problems[name] = serious(page, axe)
    go(page, "checkpoints")
    page.get_by_role("button", name="Delete").first.click()
    page.get_by_role("dialog").wait_for()
    problems["Dialog"] = serious(page, axe)
    context.close()
    assert {name: found for name, found in problems.items() if found} == {}


def test_everything_is_reached_with_the_keyboard(context: Any, server: RunningServer, made: dict[str, str]) -> None:
    page = context.new_page()
    page.goto(f"{server.url}/console/")
    page.get_by_label("API key").wait_for()
    focused = "document.activeElement.textContent.trim()"
    page.keyboard.type(server.key)  # the field has the focus
    page.keyboard.press("Enter")
    heading(page, "Runs")
    title = "[document.activeElement.tagName, document.activeElement.textContent.trim()]"
    assert page.evaluate(title) == ["H1", "Runs"], "the page's title has the focus as soon as it is seen"
    for _ in range(40):  # back to the first thing of all
        page.keyboard.press("Shift+Tab")
        if page.evaluate(focused) == "Skip to the page":
            break
    page.keyboard.press("Enter")
    assert page.evaluate(title) == ["H1", "Runs"]
    for _ in range(20):  # back into the menu, which comes before the page
        page.keyboard.press("Shift+Tab")
        if page.evaluate(focused) == "Checkpoints":
            break
    page.keyboard.press("Enter")
    heading(page, "Checkpoints")
    assert page.evaluate(title) == ["H1", "Checkpoints"], "the new page's title has the focus, so that it is read"
    page.get_by_role("button", name="Delete sampler_weights/one").wait_for()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Delete sampler_weights/one":
            break
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert page.evaluate(focused) == "Cancel", "Enter once more deletes nothing"
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Delete sampler_weights/one"


def test_dark_follows_the_system_and_the_button(browser: Any, server: RunningServer) -> None:
    context = browser.new_context(color_scheme="dark")
    page = signed_in(context, server)
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(ground)
    assert sum(int(part) for part in dark[4:-1].split(",")) < 150
    page.get_by_role("button", name="Light").click()
    light = page.evaluate(ground)
    assert sum(int(part) for part in light[4:-1].split(",")) > 600
    page.reload()
    heading(page, "Runs")
    assert page.evaluate(ground) == light, "what was chosen here is kept"
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(ground) == dark
    context.close()


def test_a_narrow_screen_shows_everything(browser: Any, server: RunningServer, made: dict[str, str]) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = signed_in(context, server)
    for name, path in made.items():
        go(page, path)
        page.locator(".loading").wait_for(state="detached")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    go(page, "checkpoints")
    heading(page, "Checkpoints")
    table = page.get_by_role("region", name="Checkpoints", exact=True)
    page.locator(".table-frame.more-right").wait_for()
    table.evaluate("it => { it.scrollLeft = it.scrollWidth }")
    page.locator(".table-frame.more-left:not(.more-right)").wait_for()
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("link", name="Queue").click()
    heading(page, "Queue")
    context.close()
