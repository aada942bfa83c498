"""Texts of callers come back as the data that they are: never as a page, a terminal's command, or a line of a log."""

from __future__ import annotations

import json
import logging

import pytest

from app.logging import JsonFormatter, TextFormatter
from tests.attacks.catalogue.case import BASE_MODEL
from tests.attacks.catalogue.doors import TEXTS
from tests.attacks.catalogue.metadata import KEPT
from tests.attacks.conftest import Attacked

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("what", KEPT)
async def test_metadata_is_given_back_as_it_came(
    attacked: Attacked, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    text, client = KEPT[what], attacked.api.client
    made = await client.post(
        "create_session", json={"display_name": text, "tags": [text], "user_metadata": {text[:200]: text}}
    )
    session = made.json()["session_id"]
    shown = [
        await client.get(f"sessions/{session}"),
        await client.post("sessions/search", json={"session_id": session}),
        await client.get("audit?day=2026-01-01"),
        await client.post(f"sessions/{session}/finish", json={"detail": text}),
        await client.get(f"sessions/{session}"),
    ]
    assert [answer.status_code for answer in (made, *shown)] == [200] * 6, [answer.text for answer in shown]
    assert shown[0].json()["display_name"] == text
    assert shown[0].json()["user_metadata"] == {text[:200]: text}
    assert shown[1].json()["sessions"][0]["display_name"] == text
    for answer in shown:
        assert answer.headers.get("content-type", "application/json") == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
    assert text not in "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("app"))


async def test_a_checkpoint_and_a_run_keep_texts_as_texts(attacked: Attacked) -> None:
    session = (await attacked.api.client.post("create_session", json={})).json()["session_id"]
    metadata = {f"k{number}": text for number, text in enumerate(KEPT.values())}
    made = await attacked.result(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model=BASE_MODEL,
        lora_config={"rank": 4, "seed": 1},
        user_metadata=metadata,
    )
    run = made["model_id"]
    await attacked.result("save_weights", model_id=run, path="x", user_metadata=metadata)
    shown = (await attacked.api.client.get(f"training_runs/{run}")).json()
    assert shown["user_metadata"] == metadata
    assert shown["last_checkpoint"]["user_metadata"] == metadata


async def test_what_is_quoted_in_an_error_is_no_page(attacked: Attacked) -> None:
    script = "<script>alert(1)</script>"
    for path in (f"/{script}", f"/api/v1/{script}", f"/api/v1/sessions/{script}", f"/v1/models/{script}"):
        answer = await attacked.api.client.get(f"http://localhost{path}")
        assert answer.status_code in (400, 404)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_trace_is_a_download_and_not_a_page(attacked: Attacked) -> None:
    made = await attacked.api.client.post("create_session", json={"display_name": KEPT["a script"]})
    session = made.json()["session_id"]
    url = (await attacked.api.client.get(f"sessions/{session}/trace_export")).json()["url"]
    answer = await attacked.edge.without_key().get(url)
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/json"
    json.loads(answer.content)


@pytest.mark.parametrize("text", TEXTS)
async def test_a_template_in_a_message_is_text(attacked: Attacked, text: str) -> None:
    async def tokens(content: str) -> int:
        body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": content}]}
        answer = await attacked.api.client.post("http://localhost/v1/messages/count_tokens", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    assert await tokens(text) == await tokens("x" * len(text.encode())), "rendered, it would have another length"


async def test_one_line_of_the_log_for_each_request_whatever_it_names(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app")
    for path in ("x%0AINFO%20forged", "x%1b%5b31m", "x%c2%9b31m", "x%e2%80%a8y", "x%00", "x" * 5000):
        caplog.clear()
        await attacked.api.client.get(path, headers={"X-Request-Id": "a b\tc", "User-Agent": "x\x1b[2J"})
        for formatter in (TextFormatter(), JsonFormatter()):
            [line] = [formatter.format(record) for record in caplog.records if record.name == "app.access"]
            assert not set(line) & {"\n", "\r", "\x1b", "\x9b", "\u2028", "\x00"}
            assert len(line) < 700
