"""Every failure has one shape, names what is wrong and gives nothing of the inside away."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI, Query
from starlette.exceptions import HTTPException

import app.errors as errors
from app.middleware import BodyLimit, RequestContext
from schemas.errors import InvalidRequest, NotFound, Unavailable
from schemas.requests import CreateSessionRequest, OptimStepRequest
from tests.app.conftest import Edge


def small_app() -> FastAPI:
    app = FastAPI()
    errors.install(app)
    app.add_middleware(BodyLimit, limit=10_000, import_limit=10_000)
    app.add_middleware(RequestContext, new_id=lambda: "generated")

    @app.post("/session")
    async def session(body: CreateSessionRequest) -> None:
        return None

    @app.post("/step")
    async def step(body: OptimStepRequest) -> None:
        return None

    @app.get("/raise/{what}")
    async def fail(what: str, limit: Annotated[int, Query(ge=1)] = 1) -> None:
        raise {
            "field": InvalidRequest("rank 0 is not accepted; 1 to 256 are", field="lora_config.rank", hint="use 32"),
            "gone": NotFound("no such thing"),
            "busy": Unavailable("stopping"),
            "teapot": HTTPException(418, "short and stout"),
            "bug": RuntimeError("secret /etc/passwd"),
        }[what]

    return app


@pytest.fixture
def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=small_app()), base_url="http://localhost")


def check_shape(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    assert "content-encoding" not in answer.headers
    body: dict[str, Any] = answer.json()
    assert set(body) == {"detail", "error"}
    assert set(body["error"]) == {"code", "category", "field", "hint", "request_id"}
    assert body["error"]["request_id"] == answer.headers["x-request-id"]
    return body


async def test_an_error_carries_everything(client: httpx.AsyncClient) -> None:
    answer = await client.get("/raise/field", headers={"X-Request-Id": "abc-1"})
    assert answer.status_code == 400
    assert check_shape(answer) == {
        "detail": "rank 0 is not accepted; 1 to 256 are (use 32)",
        "error": {
            "code": "invalid_request",
            "category": "user",
            "field": "lora_config.rank",
            "hint": "use 32",
            "request_id": "abc-1",
        },
    }


@pytest.mark.parametrize(
    ("path", "status", "code", "category"),
    [
        ("/raise/gone", 404, "not_found", "user"),
        ("/raise/busy", 503, "unavailable", "server"),
        ("/raise/teapot", 418, "invalid_request", "user"),
        ("/nothing/here", 404, "not_found", "user"),
        ("/session", 405, "method_not_allowed", "user"),
        ("/raise/bug", 500, "internal", "server"),
        ("/raise/field?limit=0", 400, "invalid_request", "user"),
    ],
)
async def test_status_and_code(client: httpx.AsyncClient, path: str, status: int, code: str, category: str) -> None:
    answer = await client.get(path, headers={"Accept-Encoding": "gzip, zstd"})
    body = check_shape(answer)
    assert (answer.status_code, body["error"]["code"], body["error"]["category"]) == (status, code, category)
    assert answer.headers.get("retry-after") == ("2" if status == 503 else None)
    if status == 405:
        assert "POST" in answer.headers["allow"]


async def test_a_bug_is_logged_and_not_told(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    answer = await client.get("/raise/bug")
    assert "secret" not in answer.text
    assert "RuntimeError" not in answer.text
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.levelno == logging.ERROR
    assert vars(record)["request_id"] == "generated"


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/session", {"tags": [1]}, "tags[0]", ["string", "got 1"]),
        ("/session", {"tagz": []}, "tagz", ["not a field"]),
        ("/session", {"tags": "x" * 5000}, "tags", ["list", "..."]),
        ("/step", {"model_id": "m", "adam_params": {"beta1": 1.5}}, "adam_params.beta1", ["less than 1", "1.5"]),
        ("/step", {}, "model_id", ["required"]),
        ("/step", {"model_id": "m", "seq_id": "8"}, "seq_id", ["integer", "'8'"]),
    ],
)
async def test_validation_names_field_value_and_what_is_accepted(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], field: str, words: list[str]
) -> None:
    answer = await client.post(path, json=body)
    told = check_shape(answer)
    assert (answer.status_code, told["error"]["field"]) == (400, field)
    for word in [field, *words]:
        assert word in told["detail"]
    assert len(told["detail"]) < 500


async def test_hostile_json(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b"{", b"\xff\xfe\x00", b"[" * 900, b"null", b'"\xed\xa0\x80"', b'{"tags": ["\\ud800"]}', b"NaN"):
        answer = await client.post("/session", content=content, headers=headers)
        assert answer.status_code in (400, 422), content
        check_shape(answer)


async def test_another_content_type_is_named(client: httpx.AsyncClient) -> None:
    answer = await client.post("/session", content=b"a=1", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert "application/json" in check_shape(answer)["detail"]


async def test_a_body_over_the_limit_is_413_declared_or_not(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/session", content=b" " * 10_001, headers=headers)
    assert answer.status_code == 413
    check_shape(answer)

    async def drip() -> Any:
        for _ in range(11):
            yield b" " * 1000

    answer = await client.post("/session", content=drip(), headers=headers)
    assert answer.status_code == 413
    assert check_shape(answer)["error"]["code"] == "payload_too_large"


async def test_the_real_application_has_the_same_shape(edge: Edge) -> None:
    check_shape(await edge.client.get("nothing"))
    check_shape(await edge.client.post("session_heartbeat", json={"session_id": "nobody"}))
    check_shape(await edge.without_key().get("sessions"))


@pytest.mark.parametrize(
    ("route", "body", "field", "accepted"),
    [
        ("create_session", {"tagz": []}, "tagz", "sdk_version, tags, type"),
        ("create_model", {"lora_config": {"rank": 8, "alpha": 16}}, "lora_config.alpha", "rank, seed"),
        ("asample", {"sampling_params": {"temprature": 1}}, "sampling_params.temprature", "stop, temperature"),
        (
            "forward_backward",
            {"data": [{"model_input": [1], "loss_fn_inputs": {}, "wieght": 1}]},
            "data[0].wieght",
            "loss_fn_inputs, model_input",
        ),
    ],
)
async def test_a_field_that_there_is_not_is_answered_with_those_that_there_are(
    edge: Edge, route: str, body: dict[str, Any], field: str, accepted: str
) -> None:
    told = check_shape(await edge.client.post(route, json=body))["detail"]
    [about] = [part for part in told.split("; ") if part.startswith(f"{field} is not a field")]
    listed = told.split(f"{about}; accepted are: ")[1].split("; ")[0]
    assert accepted in listed
