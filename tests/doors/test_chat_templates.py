"""Chats are rendered as transformers renders them, and a template cannot leave its sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.services.chat import ChatTemplate
from schemas.errors import InvalidRequest, Unavailable
from tests.support.tiny_model import write_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "the <sky>"}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "blue"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "ä", "parameters": {"type": "object"}}}]

WITH_TOOLS = """{%- if tools %}
  {{- '<tools>' }}
  {%- for tool in tools %}
    {{- tool | tojson }}
  {%- endfor %}
  {{- '</tools>' }}
{%- endif %}
{%- set seen = namespace(last='') %}
{%- for message in messages %}
  {%- if message.role == 'nobody' %}{% break %}{% endif %}
  {{- bos_token ~ message['role'] + ': ' + message['content'] | trim }}
  {%- for call in message.tool_calls or [] %}
    {{- call.function.name ~ call.function.arguments | tojson(indent=2) }}
  {%- endfor %}
  {%- set seen.last = message.role %}
  {% generation %}[{{ loop.index0 }}]{% endgeneration %}
{%- endfor %}
{{- seen.last }}{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}
"""


def folder_with(tmp_path: Path, template: str | None, **config: Any) -> Path:
    """A tokenizer's folder with this template."""
    write_tokenizer(tmp_path)
    file = tmp_path / "chat_template.jinja"
    if template is None:
        file.unlink()
    else:
        file.write_text(template)
    if config:
        settings = tmp_path / "tokenizer_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **config}))
    return tmp_path


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_it_renders_what_transformers_renders(tmp_path: Path, tools: Any) -> None:
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path, WITH_TOOLS)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate(folder).render(CHAT, tools) == expected
    assert "<sky>" in expected


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        None,
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }}"},
        ],
    )
    template = ChatTemplate(folder)
    assert template.render(CHAT, None) == "plain"
    assert template.render(CHAT, TOOLS) == "1"


def test_tools_without_a_place_are_refused(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, "{{ messages[0].content }}"))
    with pytest.raises(InvalidRequest) as refused:
        template.render(CHAT, TOOLS)
    assert refused.value.field == "tools"


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(folder_with(tmp_path, None)).render(CHAT, None)
    assert refused.value.code == "no_chat_template"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "no attribute"),
        ("{{ messages[9]['content'] + 'x' }}", "no element 9"),
        ("{{ 1 + messages[0].content }}", "TypeError"),
        ("{{ messages.append(1) }}", "not callable|unsafe|append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Overflow"),
    ],
)
def test_a_chat_that_a_template_does_not_take(tmp_path: Path, template: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        ChatTemplate(folder_with(tmp_path, template)).render(CHAT, None)
    assert refused.value.field == "messages"


def test_a_template_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be read"):
        ChatTemplate(folder_with(tmp_path, "{% if %}")).render(CHAT, None)


def test_the_time_is_there_for_templates_that_tell_it(tmp_path: Path) -> None:
    rendered = ChatTemplate(folder_with(tmp_path, "{{ strftime_now('%Y') }}")).render(CHAT, None)
    assert rendered.isdigit()
