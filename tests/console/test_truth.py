"""What a page shows is of what it names, is as new as it seems, and leaves a way out when something is gone."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.console.conftest import signed_in
from tests.console.test_pages import go, heading
from tests.console.traffic import Client
from tests.support.server import RunningServer

pytestmark = pytest.mark.browser

BASE = "acme/tiny"
POLL_MS = 2000
"""How often the page of the queue refreshes itself."""
HIDDEN = """
    window.away = true;
    Object.defineProperty(Document.prototype, "hidden", { get: () => window.away, configurable: true });
"""
"""A tab that nobody looks at: a headless browser shows all of its tabs."""


@pytest.fixture(scope="module")
def saved(client: Client) -> str:
    """A checkpoint that can be sampled."""
    return client.save(client.run(client.session("truth")), "spoken")


def test_an_answer_stands_under_the_model_that_gave_it(page: Any, saved: str) -> None:
    go(page, f"playground?checkpoint={saved}")
    heading(page, "Playground")
    page.get_by_label("As", exact=True).select_option("text")
    page.get_by_label("Prompt").fill("The sky is")
    page.get_by_label("Most tokens").fill("4")
    page.get_by_role("button", name="Ask both").click()
    spoken, base = page.get_by_role("region", name=re.compile("^spoken")), page.get_by_role("region", name=BASE)
    for side in (base, spoken):
        side.get_by_text(re.compile("cut off|ended by itself")).wait_for()
    page.get_by_label("Right").select_option(BASE)
    page.get_by_label("Left").select_option("")
    assert [side.count() for side in (base, spoken)] == [1, 1], "both answers keep the names of their models"
    page.get_by_role("button", name="Ask both").click()
    none = page.get_by_role("region", name="No model on the left")
    none.get_by_text("Its answer comes here.").wait_for()
    base.get_by_text(re.compile("cut off|ended by itself")).wait_for()
    assert spoken.count() == 0
    assert none.locator(".said").count() == 0, "what was answered before is not an answer to this"


def test_a_verdict_does_not_outlive_the_choice_of_its_models(page: Any, saved: str) -> None:
    go(page, f"evaluate?checkpoint={saved}")
    heading(page, "Evaluation")
    page.get_by_text("Or type them here").click()
    page.get_by_label("Examples", exact=True).fill(json.dumps({"prompt": "The sky is", "completion": " blue."}))
    page.get_by_role("button", name="Read them").click()
    page.get_by_text("1 example of the text above").wait_for()
    for label, choice in (("Before", saved), ("After", BASE)):
        page.get_by_role("button", name="Score them").click()
        page.get_by_role("region", name="Each example").wait_for()
        page.get_by_label(label).select_option(choice)
        page.get_by_text("Nothing is scored yet").wait_for()
        assert page.locator(".verdict").count() == 0


def test_a_page_that_is_opened_in_a_hidden_tab_is_there_when_it_is_looked_at(
    context: Any, server: RunningServer, client: Client, saved: str
) -> None:
    context.add_init_script(HIDDEN)
    page = signed_in(context, server)
    page.get_by_role("region", name="Training runs").wait_for()
    go(page, f"checkpoints/{saved.removeprefix('tinker://')}")
    page.get_by_role("button", name="Publish").click()
    page.get_by_role("dialog").get_by_role("button", name="Publish").click()
    page.get_by_role("button", name="Unpublish").wait_for()
    page.get_by_text("every project", exact=True).wait_for()

    go(page, "queue")
    page.get_by_role("heading", name="Waiting and running").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/queue") else None)
    page.wait_for_timeout(1.5 * POLL_MS)
    assert asked == [], "nobody looks at it"
    with page.expect_request("**/queue"):  # what was due meanwhile
        page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    with page.expect_request("**/queue"):  # and from then on as before
        page.wait_for_timeout(POLL_MS / 4)


def test_a_run_that_is_gone_takes_no_others_along(page: Any, client: Client) -> None:
    run = client.run(client.session("compared"))
    client.step(run, [client.tokens("The sky is", " blue.")], 1e-3)
    go(page, f"compare?runs=nope,{run}")
    wrong = page.get_by_role("alert")
    wrong.get_by_text("nope is left out of the comparison").wait_for()
    assert "there is no training run 'nope'" in wrong.inner_text()
    assert page.get_by_role("region", name="The runs in numbers").get_by_role("row").count() == 2
    page.get_by_role("button", name="Leave out nope").click()
    wrong.wait_for(state="detached")
    page.get_by_role("region", name="The runs in numbers").wait_for()

    go(page, "compare?runs=nope")
    wrong.wait_for()
    assert page.get_by_text("No run is chosen").count() == 0
    page.get_by_label("Add a run").select_option(run)
    page.get_by_role("region", name="The runs in numbers").wait_for()


def test_runs_can_be_taken_out_while_the_server_tells_nothing(page: Any) -> None:
    page.route("**/api/v1/training_runs*", lambda route: route.abort())
    go(page, "compare?runs=one,two")
    page.get_by_text("The server does not answer").wait_for()
    page.get_by_role("button", name="Leave out two").click()
    page.get_by_role("button", name="Leave out two").wait_for(state="detached")
    page.get_by_role("button", name="Leave out one").wait_for()
