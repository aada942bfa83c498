"""What people do in the console, in a real browser on a real server of a tiny model."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.console.conftest import signed_in
from tests.console.traffic import Client
from tests.support.server import RunningServer

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror='window.broken=1'><script>window.broken=1</script>"
PROMPT, ANSWER = "The sky is", " blue."


_GO = """path => new Promise(drawn => {
  const frames = () => requestAnimationFrame(() => requestAnimationFrame(drawn));
  const before = location.hash;
  addEventListener("hashchange", frames, { once: true });
  location.hash = "#/" + path;
  if (location.hash === before) frames();
})"""


def go(page: Any, path: str) -> None:
    """A page of the console, by its address; it is drawn then, whatever it still loads."""
    page.evaluate(_GO, path)


def heading(page: Any, name: str | re.Pattern[str]) -> Any:
    """The page's title, once it is there."""
    found = page.get_by_role("heading", name=name, level=1)
    found.wait_for()
    return found


@pytest.fixture(scope="session")
def learned(client: Client) -> tuple[str, str]:
    """A run that has learned one answer by heart, and its checkpoint."""
    run = client.run(client.session("learning"), rank=8)
    data = [client.tokens(PROMPT, ANSWER)]
    for _ in range(12):
        client.step(run, data, 2e-2)
    return run, client.save(run, "learned")


def test_signing_in_and_out(context: Any, server: RunningServer) -> None:
    page = context.new_page()
    page.goto(f"{server.url}/console/")
    page.get_by_role("button", name="Sign in").click()
    assert "Type the key first" in page.get_by_role("alert").inner_text()
    page.get_by_label("API key").fill("tml-wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("does not accept this key").wait_for()
    page.get_by_label("API key").fill(f"  {server.key} ")
    page.keyboard.press("Enter")
    heading(page, "Runs")
    assert context.cookies() == []
    assert server.key not in json.dumps(context.storage_state())
    assert server.key not in page.url
    page.reload()
    heading(page, "Runs")
    other = context.new_page()
    other.goto(f"{server.url}/console/")
    other.get_by_label("API key").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_refused_key_and_a_silent_server_are_said_in_words(page: Any) -> None:
    page.route("**/api/v1/training_runs*", lambda route: route.abort())
    page.get_by_text("The server does not answer").wait_for()
    page.unroute("**/api/v1/training_runs*")
    page.get_by_text("The server does not answer").wait_for(state="detached")
    body = {"detail": "no", "error": {"message": "a valid API key is required", "code": "unauthenticated"}}
    page.route("**/api/v1/queue", lambda route: route.fulfill(status=401, json=body))
    go(page, "queue")
    page.get_by_label("API key").wait_for()
    assert "a valid API key is required" in page.get_by_role("alert").inner_text()


def test_a_plot_grows_while_it_is_looked_at(page: Any, client: Client) -> None:
    run = client.run(client.session("watched"))
    go(page, f"training_runs/{run}")
    page.get_by_text("No training step yet").wait_for()
    data = [client.tokens(PROMPT, ANSWER)]
    for step in range(1, 4):
        told = client.step(run, data, 1e-2)
        loss = page.locator(".plot-area[aria-label^='Loss per token']")
        page.locator(f".plot-area[aria-label^='Loss per token'][data-points='{step}'] canvas").wait_for()
    assert loss.count() == 1
    page.locator(".plot-area[aria-label^='Gradient norm'] canvas").wait_for()
    page.get_by_text("The numbers as a table").click()
    last = page.get_by_role("region", name="Steps of the run").get_by_role("row").nth(1)
    shown = float(last.get_by_role("cell").first.inner_text())
    assert shown == pytest.approx(told["metrics"]["loss:sum"] / len(ANSWER), rel=1e-3)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download CSV").click()
    rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    client.do("unload_model", model_id=run)
    page.get_by_text("It takes no more work").wait_for()


def test_the_queue_says_why(page: Any, client: Client) -> None:
    run = client.run(client.session("queued"))
    client.step(run, [client.tokens(PROMPT, ANSWER)], 1e-3)
    for number in (900, 901):
        client.post("optim_step", model_id=run, seq_id=number, adam_params={"learning_rate": 1e-3})
    go(page, "queue")
    row = page.get_by_role("row", name=re.compile("optimizer step #900"))
    row.wait_for()
    assert "seq_id" in row.inner_text()
    last = page.get_by_role("row", name=re.compile("optimizer step #901")).get_by_role("cell").last.inner_text()
    assert re.match("about|any moment", last), "one step was done before, so there is an estimate"
    go(page, f"training_runs/{run}")
    page.get_by_text("1 more waits behind it").wait_for()
    go(page, "training_runs")
    page.get_by_role("link", name="2 waiting").wait_for()


def test_comparing_runs(page: Any, client: Client, learned: tuple[str, str]) -> None:
    other = client.run(client.session("slower"), rate="low")
    for _ in range(4):
        client.step(other, [client.tokens(PROMPT, ANSWER)], 1e-4)
    for run in (learned[0], other):
        page.get_by_role("checkbox", name=re.compile(re.escape(run[:8]))).check()
    page.get_by_role("link", name="Compare 2 runs").click()
    heading(page, "Compare runs")
    page.get_by_text(re.compile("The lowest loss per token now: " + learned[0][:8])).first.wait_for()
    page.locator(".plot-area canvas").first.wait_for()  # the plot is drawn a moment after the text
    assert page.locator(".plot-area canvas").count() == 1
    assert page.get_by_role("region", name="The runs in numbers").get_by_role("row").count() == 3
    region = page.get_by_role("region", name="The runs in numbers")
    assert region.evaluate("it => it.scrollWidth <= it.clientWidth"), "nothing is cut off at the right"
    page.get_by_label("What to plot").select_option("norm")
    page.locator(".plot-area[aria-label^='Gradient norm'] canvas").wait_for()


def test_a_loss_that_is_not_zero_did_not_fall_by_all_of_it(page: Any) -> None:
    said = page.evaluate(
        """async () => {
            const { verdict, verdictText } = await import(new URL("lib/series.js", document.baseURI).href);
            const courses = [[4, 3, 2, 1.96], [4, 3, 1, 0.022], [4, 3, 1, 0.0001], [1, 2, 3, 4]];
            return courses.map((losses) => verdictText(verdict(losses)));
        }"""
    )
    parts = [re.search("(?:fell|rose) by (.*?):", one) for one in said]
    assert [part and part[1] for part in parts] == ["51 %", "99.5 %", "more than 99.9 %", "300 %"]


def test_a_checkpoint_is_published_kept_fetched_and_deleted(page: Any, client: Client) -> None:
    run = client.run(client.session("saving"))
    path = client.save(run, "short-lived")
    go(page, "checkpoints")
    row = page.get_by_role("row", name=re.compile("short-lived"))
    row.get_by_role("button", name="Publish").click()
    page.get_by_role("dialog").get_by_role("button", name="Publish").click()
    row.get_by_text("every project").wait_for()
    row.get_by_label(re.compile("expires")).select_option(label="in a week")
    row.get_by_text(re.compile("in [67] days")).wait_for()
    with page.expect_download() as saved:
        row.get_by_role("button", name="Download").click()
    assert b"adapter_config.json" in Path(saved.value.path()).read_bytes()

    row.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog", name="Delete this checkpoint?")
    assert path in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert path in str(client.http.get("checkpoints").json())
    row.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete for good").click()
    row.wait_for(state="detached")
    assert path not in str(client.http.get("checkpoints").json())


def test_the_playground_asks_both_with_the_same_seed(page: Any, learned: tuple[str, str]) -> None:
    go(page, f"playground?checkpoint={learned[1]}")
    heading(page, "Playground")
    page.get_by_label("As", exact=True).select_option("text")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("6")
    page.get_by_role("button", name="Ask both").click()
    right = page.get_by_role("region", name=re.compile("learned"))
    right.get_by_text("blue.").wait_for()
    left = page.get_by_role("region", name="acme/tiny")
    left.get_by_text("It was cut off").wait_for()
    assert "blue" not in left.inner_text()
    page.get_by_label("Show each token").check()
    first = right.get_by_role("listitem").first
    share = float(first.get_by_role("button").get_attribute("aria-label").split(",")[1].split()[0])
    assert 50 < share <= 100, "learned by heart, and the number is there to read"
    assert first.inner_text().strip().endswith("%")
    first.get_by_role("button").click()
    assert "logprob" in right.get_by_role("status").inner_text()

    page.get_by_label("Right").select_option("acme/tiny")
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("As", exact=True).select_option("chat")
    page.get_by_label("Show each token").uncheck()
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("button", name="Ask both").wait_for()
    page.locator(".answer[aria-busy=false] .said").nth(1).wait_for()
    said = page.locator(".answer .said").all_inner_texts()
    assert said[0] == said[1], "the same weights with the same seed say the same"


def test_an_evaluation_says_whether_training_helped(
    page: Any, client: Client, learned: tuple[str, str], tmp_path: Path
) -> None:
    run, path = learned
    items = [{"prompt": PROMPT, "completion": ANSWER}, {"prompt": "=1+1", "completion": "zzz"}]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file = tmp_path / "items.jsonl"
    file.write_text("\n".join(json.dumps(item) for item in [*items, {"messages": chat}]))
    go(page, f"evaluate?checkpoint={path}")
    heading(page, "Evaluation")
    page.get_by_label(re.compile("^Examples, one JSON")).set_input_files(file)
    page.get_by_text("3 examples of items.jsonl").wait_for()
    page.get_by_role("button", name="Score them").click()
    page.get_by_role("button", name="Score them").wait_for()
    first = page.get_by_role("region", name="Each example").get_by_role("row").nth(1)
    cells = first.get_by_role("cell").all_inner_texts()
    scored = client.do("forward", model_id=run, data=[client.tokens(PROMPT, ANSWER)], loss_fn="cross_entropy")
    assert float(cells[3]) == pytest.approx(scored["metrics"]["loss:sum"] / len(ANSWER), abs=2e-3)
    assert float(cells[2]) > 2 > float(cells[3])
    assert cells[5] == "win"
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download CSV").click()
    rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    assert (len(rows), rows[1]["prompt"]) == (3, "'=1+1"), "no formula for a spreadsheet"
    assert "sign test" in page.get_by_text(re.compile("ahead")).inner_text()
    file.write_text('{"prompt": "a", "completion": "b"}\nnonsense')
    page.get_by_label(re.compile("^Examples, one JSON")).set_input_files(file)
    page.get_by_text("Line 2 is not JSON").wait_for()


def test_texts_of_users_stay_texts(page: Any, client: Client) -> None:
    session = client.session(EVIL, note=EVIL)
    run = client.run(session, note=EVIL)
    client.post("optim_step", model_id=run, seq_id=77, adam_params={"learning_rate": 1e-3})
    client.save(client.run(session, 1), "plain")
    finishing = client.session(EVIL)
    client.http.post(f"sessions/{finishing}/finish", json={"reason": {"type": "errored"}, "detail": EVIL})
    pages = ["training_runs", f"training_runs/{run}", f"compare?runs={run}", "queue", "sessions", "checkpoints"]
    pages += [
        f"sessions/{session}",
        f"sessions/{finishing}",
        "audit",
        f"keys?new_key=true&key_name={EVIL}",
        f"training_runs/{EVIL}",
    ]
    seen = 0
    for path in pages:
        go(page, path)
        page.locator(".loading").wait_for(state="detached")
        page.wait_for_timeout(800)
        seen += page.get_by_text("onerror=").count()
        assert page.locator("img[src=x], main script").count() == 0, path
        assert page.evaluate("window.broken") is None, path
    assert seen >= 5, "the texts were shown, as texts"


def test_addresses_that_the_sdk_makes_lead_to_their_pages(
    context: Any, server: RunningServer, learned: tuple[str, str]
) -> None:
    page = signed_in(context, server)
    run, path = learned
    wanted = {
        f"/training_runs/{run}": re.compile("^Run "),
        f"/sessions/{run.split(':')[0]}": re.compile("^Session learning"),
        f"/checkpoints/{run.replace(':', '%3A')}/sampler_weights%2Flearned": "Checkpoint learned",
        f"/playground?mode=checkpoint&checkpoint={path.replace(':', '%3A').replace('/', '%2F')}": "Playground",
        "/keys?new_key=true&key_name=laptop": "Keys and usage",
    }
    for address, title in wanted.items():
        page.goto(server.url + address)
        heading(page, title)
    page.get_by_text("A client asks for a new key called laptop").wait_for()
    page.get_by_role("region", name="Keys", exact=True).wait_for()


def test_the_audit_log_names_the_key_and_the_zone(page: Any, client: Client) -> None:
    own = client.http.get("auth/apikey/me").json()["name"]
    client.session("audited")
    go(page, "audit")
    line = page.get_by_role("region", name="Events of the day").get_by_role("row").nth(1)
    line.wait_for()
    assert re.search(r"\d\d:\d\d:\d\d UTC", line.inner_text())
    page.get_by_role("region", name="Events of the day").get_by_text(f"key {own}", exact=True).first.wait_for()
