"""No key, token, prompt, signed address or stored value reaches a line of the log, at any level."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app import logging as server_log
from app import permissions
from app.logging import JsonFormatter, TextFormatter
from app.settings import Settings
from tests.app.conftest import MODEL, Edge, running
from tests.support.api import DATA, Api

SERVER = "http://localhost"
WORDS = "the heron stands on one leg"
TOKENS = [87, 211, 14, 199, 63]


def lines(caplog: pytest.LogCaptureFixture) -> str:
    """Everything that was logged, in both forms, except what the test's own client and loop say of themselves."""
    records = [one for one in caplog.records if not one.name.startswith(("httpx", "httpcore", "asyncio"))]
    return "\n".join(form.format(one) for one in records for form in (TextFormatter(), JsonFormatter()))


async def test_a_whole_round_of_requests_leaves_no_secret_in_the_log(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong_key = f"tml-{secrets.token_urlsafe(32)}"
    session = (await api.post("create_session", sdk_version="t", tags=[WORDS], user_metadata={"note": WORDS})).json()
    model_id = await api.model(session["session_id"])
    data = [{"model_input": TOKENS, "loss_fn_inputs": {"target_tokens": TOKENS, "weights": [1.0] * 5}}]
    await api.train(model_id, data=data)
    await api.do("save_weights_external", model_id=model_id, path="out", ttl_seconds=3600)
    answer = await api.client.get(f"training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls")
    [address, _] = answer.json()["urls"].values()
    signature = address.partition("signature=")[2]
    async with api.edge.without_key() as stranger:
        assert (await stranger.get(address)).status_code == 200
        assert (await stranger.get(address[:-1] + "0")).status_code in (200, 404)
        assert (await stranger.get("sessions", headers={"X-API-Key": wrong_key})).status_code == 401
        assert (await stranger.get("sessions", headers={"Authorization": f"Bearer {wrong_key}"})).status_code == 401
    chat = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}], "max_tokens": 3}
    assert (await api.client.post(f"{SERVER}/v1/chat/completions", json=chat)).status_code == 200
    assert (await api.client.post(f"{SERVER}/v1/chat/completions", json={**chat, "top_p": WORDS})).status_code == 400
    assert (await api.post("forward", model_id=model_id, data=DATA, loss_fn=WORDS)).status_code == 400
    await api.client.get(f"sessions?api_key={wrong_key}&q={WORDS}")
    text = lines(caplog)
    assert text.count("app.access") > 20
    for secret in (api.edge.app.state.dev_key, wrong_key, signature, WORDS, WORDS.replace(" ", "%20"), "87, 211, 14"):
        assert secret not in text


async def test_what_nobody_expected_is_logged_without_what_the_client_sent(
    make_settings: Callable[..., Settings], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is there, the value that a library quotes in its error is not; the client sees neither."""

    class Body(BaseModel):
        count: int

    async with running(make_settings()) as edge:

        async def broken() -> None:
            try:
                Body.model_validate({"count": WORDS})
            except ValidationError as error:
                raise LookupError("a stored body is not what it was") from error

        monkeypatch.setattr(permissions, "ROUTES", {**permissions.ROUTES, "broken": permissions.ANY_KEY})
        edge.app.router.add_api_route("/api/v1/broken", broken, operation_id="broken")
        answer = await edge.client.get("broken", headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500
    for secret in (WORDS, "pydantic", "Traceback", "/"):
        assert secret not in answer.json()["detail"]
    text = lines(caplog)
    assert "Traceback" in text
    assert "request_id=mine" in text
    assert WORDS not in text


@pytest.mark.parametrize(
    "secret",
    [
        f"tml-{'Ab3_-xYz' * 5}",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl",
        "Bearer abcdefghijkl",
        "signature=0123abcd",
        "X-Amz-Signature=0123abcd",
        "postgresql+asyncpg://user:opensesame@host/db",
        "[parameters: ('opensesame', 1)]",
        "Input should be valid [type=x, input_value='opensesame', input_type=str]",
    ],
)
@pytest.mark.parametrize("place", ["message", "argument", "field", "exception"])
def test_what_looks_like_a_secret_is_blotted_out_wherever_it_is(secret: str, place: str) -> None:
    hidden = secret.rpartition("=")[2] if "ignature" in secret else "opensesame" if "opensesame" in secret else secret
    error = RuntimeError(secret) if place == "exception" else None
    message, given = (secret, ()) if place == "message" else ("said %s", (secret if place == "argument" else "x",))
    failed: Any = None if error is None else (RuntimeError, error, None)
    record = logging.LogRecord(
        "x", logging.INFO, "f", 1, message.replace("%", "%%") if not given else message, given, failed
    )
    if place == "field":
        record.detail = secret
    for form in (TextFormatter(), JsonFormatter()):
        text = form.format(record)
        assert hidden not in text
        assert "[hidden]" in text


def test_ordinary_lines_are_left_alone() -> None:
    for text in ("GET /api/v1/sessions 200", "basic words", "http://127.0.0.1:8410 is up", "key_id=0af3 ms=1.5"):
        assert server_log.blotted(text) == text


async def test_refusals_do_not_repeat_keys(edge: Edge) -> None:
    key = f"tml-{secrets.token_urlsafe(32)}"
    async with edge.without_key() as stranger:
        for headers in ({"X-API-Key": key}, {"Authorization": f"Bearer {key}"}, {"Authorization": f"Basic {key}"}):
            assert key not in (await stranger.get("sessions", headers=headers)).text


def test_the_error_that_a_library_raises_would_have_quoted_it() -> None:
    """So that the test above cannot pass because there is nothing to hide."""

    class Body(BaseModel):
        count: int

    with pytest.raises(ValidationError) as failure:
        Body.model_validate({"count": WORDS})
    assert WORDS in str(failure.value)
