"""Chats to prompts: the chat template of a base model, rendered as transformers renders it.

A template is a program in the model's folder. It runs in jinja's sandbox, sees plain values only, and cannot reach the
server. Not responsible for tokens (`app/services/doors/tokens.py`) or for a protocol's shapes (`app/services/doors`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from schemas.errors import InvalidRequest, Unavailable

Message = dict[str, Any]
"""`role`, `content` (text) and, where they apply, `name`, `tool_calls`, `tool_call_id`."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOOL_TEMPLATE = "tool_use"


class ChatTemplate:
    """The chat template in a model's folder, if there is one. Reads files when it is made."""

    def __init__(self, folder: Path) -> None:
        config = _read_config(folder)
        self._special = _special_tokens(folder, config)
        self._templates = _templates(folder, config)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The prompt that asks for the assistant's next message. Slow for a long chat, so for a thread.

        Raises:
            InvalidRequest: the model has no template, the template has no place for tools, or refuses the chat.
        """
        template = self._choose(tools)
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except jinja2.exceptions.TemplateError as error:
            raise _refused(str(error)) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            # A template written for another order or kind of messages: the chat is at fault, not the server.
            raise _refused(type(error).__name__) from None

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        source = self._templates.get("default")
        if tools and _TOOL_TEMPLATE in self._templates:
            source = self._templates[_TOOL_TEMPLATE]
        if source is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot take messages",
                field="model",
                hint="send a prompt to completions",
                code="no_chat_template",
            )
        try:
            if tools and "tools" not in jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source)):
                raise InvalidRequest(
                    "tools: the chat template of this model has no place for tools",
                    field="tools",
                    hint="describe them in a message",
                )
            return _ENVIRONMENT.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise Unavailable(f"the chat template of this model cannot be read: {str(error)[:200]}") from None


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"messages: the chat template of this model does not take this chat: {reason[:300]}", field="messages"
    )


# -- the model's folder ------------------------------------------------------------------------------------------------
def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A file of its own wins over the configuration, as in transformers."""
    stored = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, list):
        found = {str(each["name"]): str(each["template"]) for each in stored}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = file.read_text(encoding="utf-8")
    for extra in (folder / "additional_chat_templates").glob("*.jinja"):
        found[extra.stem] = extra.read_text(encoding="utf-8")
    return found


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "special_tokens_map.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = {}
    for name in _SPECIAL:
        value = config.get(name) or stored.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


# -- what templates may use --------------------------------------------------------------------------------------------
class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks. Rendering only lets it through."""

    tags = {"generation"}  # noqa: RUF012 (the attribute that jinja declares)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter escapes HTML, which would change prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


_ENVIRONMENT = _environment()
