"""The routes for clients of other protocols: wrong roles, floods of messages, bombs of tools, templates in texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.attacks.catalogue.case import BASE_MODEL, Case, spliced
from tests.attacks.catalogue.numbers import LITERALS

USER = [{"role": "user", "content": "x"}]
COMPLETION: dict[str, Any] = {"model": BASE_MODEL, "prompt": "x", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": BASE_MODEL, "messages": USER, "max_tokens": 1}


def _deep(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"x": value}}
    return value


def _tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def cases() -> Iterator[Case]:
    """Completions, chats, messages."""
    for what, messages in (
        ("no messages", []),
        ("an unknown role", [{"role": "root", "content": "x"}]),
        ("a role that is a template", [{"role": "{{ cycler.__init__ }}", "content": "x"}]),
        ("no role", [{"content": "x"}]),
        ("no content", [{"role": "user"}]),
        ("content that is a number", [{"role": "user", "content": 5}]),
        ("content that is an object", [{"role": "user", "content": {"text": "x"}}]),
        ("an unknown part", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
        ("20,000 messages", USER * 20_000),
        ("messages that are a text", "x"),
        ("a message that is a list", [["user", "x"]]),
        ("a tool's message without its call", [{"role": "tool", "content": "x"}]),
        ("an unknown field", [{"role": "user", "content": "x", "cache": True}]),
    ):
        yield Case(f"{what} in a chat", "/v1/chat/completions", {**CHAT, "messages": messages}, field="messages")
        yield Case(f"{what} in messages", "/v1/messages", {**CHAT, "messages": messages}, says="messages")
    long = "x" * 200_000
    yield Case("a prompt far beyond the context", "/v1/completions", {**COMPLETION, "prompt": long}, says="context")
    yield Case("a chat far beyond the context", "/v1/chat/completions",
               {**CHAT, "messages": [{"role": "user", "content": long}]}, says="context")  # fmt: skip
    yield Case("10,000 short messages", "/v1/chat/completions", {**CHAT, "messages": USER * 10_000}, says="context")
    for what, tools in (
        ("a tool of 900 levels", [_tool(_deep(300))]),
        ("a tool of two thousand keys", [_tool({"properties": {f"k{i}": {} for i in range(2000)}})]),
        ("1,000 tools", [_tool({})] * 1000),
        ("a tool with a line break in its name", [_tool({}, "a\nb")]),
        ("a tool that is no function", [{"type": "code_interpreter"}]),
        ("a tool that refers to itself", [_tool({"$ref": "#"})]),
        ("a tool that refers to an address", [_tool({"$ref": "http://169.254.169.254/x"})]),
        ("tools that are a text", "x"),
    ):
        yield Case(what, "/v1/chat/completions", {**CHAT, "tools": tools})
    for literal in LITERALS:
        for name in ("temperature", "top_p", "frequency_penalty"):
            yield Case(f"{literal} as {name} of a completion", "/v1/completions",
                       content=spliced({**COMPLETION, name: "@@"}, literal))  # fmt: skip
    for name, values in (
        ("n", (0, -1, 129, 2**63, 1.5, "2")),
        ("max_tokens", (-1, 2**31, 10**6, 1.5, "5")),
        ("temperature", (-1, 3, 1e-9, "1")),
        ("top_p", (0, 2, -1, "1")),
        ("seed", (-1, 1.5, "x")),
        ("stop", (["s"] * 10_000, [""], [5], "", ["x" * 2000], {"x": 1})),
        ("prompt", ([], [[]], [-1], [259], [2**63], {"x": 1}, None, ["x"] * 2000, [["x"]], [1, "x"])),
        ("logprobs", (-1, 21, True)),
        ("best_of", (5,)),
        ("logit_bias", ({"5": 1},)),
        ("stream", ("yes", 1)),
        ("stream_options", ({"include_usage": True},)),
        ("guided_regex", ("(a+)+$",)),
        ("guided_json", (_deep(5),)),
        ("chat_template", ("{{ ''.__class__ }}",)),
    ):  # fmt: skip
        for value in values:
            yield Case(f"{str(value)[:30]} as {name} of a completion", "/v1/completions", {**COMPLETION, name: value})
    for name in ("chat_template", "chat_template_kwargs", "functions", "response_format", "add_generation_prompt"):
        yield Case(f"{name} in a chat", "/v1/chat/completions", {**CHAT, name: {"type": "{{7*7}}"}})
    for path in ("tinker://$model/weights/..", "tinker://$model/sampler_weights/none", "$sampler", "$model"):
        for route, body in (("completions", COMPLETION), ("chat/completions", CHAT), ("messages", CHAT)):
            yield Case(f"{path} as model of {route}", f"/v1/{route}", {**body, "model": path}, status=(400, 404))
    for path in ("..%2f..%2fetc%2fpasswd", "%00", "%ff", "x" * 5000):
        yield Case(f"{path[:30]} in the address of a model", f"/v1/models/{path}", method="GET", status=(400, 404))
    for version in ("2019-01-01", "x", "2023-06-01\u00e9".encode().decode("latin-1"), "9" * 5000):
        headers = {"anthropic-version": version}
        yield Case(f"version {version[:20]} of the protocol", "/v1/messages", CHAT, headers=headers)


TEXTS = (
    "{{ 7 * 7 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "${7*7} #{7*7} <%= 7*7 %>",
)
"""Templates in a message: they are text, for the model to read."""
