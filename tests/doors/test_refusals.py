"""What is not supported is refused by the name of the parameter, in the shape that the protocol's clients read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.doors.conftest import CHAT, MODEL, Doors

COMPLETION = {"model": MODEL, "prompt": "abc", "max_tokens": 1}
CHATTING = {"model": MODEL, "messages": CHAT, "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _openai_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"foo": 1}, "foo", "accepted are: best_of, echo, frequency_penalty"),
        ({"prompt": None}, "prompt", "prompt"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", "no tokens"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": [1, "a"]}, "prompt", "prompt"),
        ({"prompt": [100000]}, "prompt", "vocabulary"),
        ({"prompt": {"text": "a"}}, "prompt", "prompt"),
        ({"best_of": 3}, None, "best_of 3"),
        ({"suffix": "x"}, "suffix", "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "0.5 is not supported"),
        ({"frequency_penalty": -1}, "frequency_penalty", "-1 is not supported"),
        ({"max_tokens": 0}, None, "echo"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": "8"}, "max_tokens", "integer"),
        ({"max_tokens": 10**6}, "max_tokens", "context"),
        ({"temperature": 3}, "temperature", "2"),
        ({"temperature": 1e-9}, "temperature", "0 (greedy)"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "128"),
        ({"n": 128, "max_tokens": 8000}, "n", "room"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"stop": ["a"] * 17}, "stop", "stop"),
        ({"stop": ""}, "stop", "stop"),
        ({"stop": [5]}, "stop", "stop"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": 1, "echo": True, "stream": True}, None, "not streamed"),
        ({"stream_options": {"include_usage": True}}, None, "stream"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"model": 5}, "model", "string"),
    ],
)
def test_completions(doors: Doors, change: dict[str, Any], param: str | None, says: str) -> None:
    with doors.http() as client:
        error = _openai_error(client.post("/v1/completions", json={**COMPLETION, **change}), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort", "accepted are: frequency_penalty"),
        ({"functions": []}, "functions", "accepted are"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content is required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]", "content is required"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]", "tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "image_url",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "nope"}}],
                    }
                ]
            },
            "messages[0].tool_calls",
            "JSON object",
        ),
        ({"tools": [TOOL]}, "tools", "no place for tools"),
        ({"tool_choice": "required"}, "tool_choice", "'auto'"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ({"top_logprobs": 2}, None, "logprobs"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, None, "differ"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"store": True}, "store", "False"),
    ],
)
def test_chat(doors: Doors, change: dict[str, Any], param: str | None, says: str) -> None:
    with doors.http() as client:
        error = _openai_error(client.post("/oai/api/v1/chat/completions", json={**CHATTING, **change}), 400)
    assert error["param"] == param
    assert says in error["message"]


def test_values_that_change_nothing_are_taken(doors: Doors) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "somebody",
        "n": None,
        "stop": None,
        "response_format": {"type": "text"},
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "seed": 2**80,
        "top_k": 5,
    }
    with doors.http() as client:
        assert client.post("/v1/chat/completions", json={**CHATTING, **neutral}).status_code == 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mcp_servers": []}, "accepted are: cache_control, max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "'disabled'"),
        ({"tool_choice": {"type": "any"}}, "'auto'"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "no place for tools"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "a"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'text'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "tool_use",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/anthropic/api/v1/messages", "/v1/messages"])
def test_messages(doors: Doors, change: dict[str, Any], says: str, path: str) -> None:
    with doors.http() as client:
        answer = client.post(path, json={**CHATTING, **change})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == "invalid_request_error"
    assert says in body["error"]["message"]
    assert body["request_id"] == answer.headers["x-request-id"]


def test_versions_of_the_protocol(doors: Doors) -> None:
    with doors.http() as client:
        for version, status in (("2023-06-01", 200), ("2026-10-21", 200), ("2019-01-01", 400)):
            answer = client.post("/v1/messages", json=CHATTING, headers={"anthropic-version": version})
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer tml-wrong"}, 401),
        ({"Authorization": "KEY"}, 401),
        ({"Authorization": "Bearer KEY", "x-api-key": "tml-other"}, 401),
        ({"Authorization": "Bearer KEY"}, 200),
        ({"x-api-key": "KEY"}, 200),
    ],
)
def test_keys(doors: Doors, headers: dict[str, str], status: int) -> None:
    sent = {name: value.replace("KEY", doors.server.key) for name, value in headers.items()}
    for path in ("/v1/completions", "/v1/messages", "/anthropic/api/v1/messages"):
        body = COMPLETION if path.endswith("completions") else CHATTING
        answer = httpx.post(doors.server.url + path, json=body, headers=sent)
        assert answer.status_code == status, answer.text
        if status == 401:
            error = answer.json()["error"]
            assert error["type"] == "authentication_error"
            assert ("param" in error) is path.endswith("completions")


def test_what_is_not_there_and_what_is_not_json(doors: Doors) -> None:
    with doors.http() as client:
        assert _openai_error(client.get("/v1/nothing"), 404)["type"] == "not_found_error"
        assert _openai_error(client.get("/v1/completions"), 405)["code"] == "method_not_allowed"
        headers = {"Content-Type": "application/json"}
        broken = client.post("/v1/completions", content=b'{"model": NaN}', headers=headers)
        assert _openai_error(broken, 400)["code"] == "invalid_json"
        twice = client.post("/v1/completions", content=b'{"model": "a", "model": "b"}', headers=headers)
        assert "given twice" in _openai_error(twice, 400)["message"]
        form = client.post("/v1/completions", content=b"a=b", headers={"Content-Type": "text/plain"})
        assert _openai_error(form, 415)["param"] == "Content-Type"
        large = client.post("/v1/completions", json={**COMPLETION, "prompt": "a" * 5_000_000})
        assert _openai_error(large, 413)["code"] == "payload_too_large"
        assert client.get("/anthropic/api/v1/nothing").json()["error"]["type"] == "not_found_error"
