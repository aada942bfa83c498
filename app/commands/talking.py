"""What `sample` and `chat` share: which model, and the streamed answer of the OpenAI routes, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import typer

from app.commands.client import Server
from app.commands.output import FAILED, UNREACHABLE, fail

DOOR = "/v1"
"""The routes for OpenAI's clients, below the server's address."""
_DATA = "data:"
_END = "[DONE]"


def first_model(server: Server) -> str:
    """The server's default base model."""
    models = server.get("get_server_capabilities")["supported_models"]
    return str(models[0]["model_name"])


def pieces(server: Server, route: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of an answer as they come.

    Ends the command if the server refuses, fails on the way, or goes away.
    """
    request = {name: value for name, value in body.items() if value is not None} | {"stream": True}
    ended = False
    try:
        for line in server.stream_lines("POST", f"{server.url}{DOOR}/{route}", body=request):
            text = line[len(_DATA) :].strip() if line.startswith(_DATA) else ""
            if text == _END:
                ended = True
                break
            with suppress(ValueError):
                chunk = json.loads(text)
                if "error" in chunk:
                    raise _failed(chunk["error"])
                yield chunk
    except ConnectionError:
        raise fail("the answer broke off: the server went away", "ask again", UNREACHABLE) from None
    if not ended:
        raise fail("the answer broke off: its end did not come", "ask again", UNREACHABLE)


def _failed(error: Any) -> typer.Exit:
    message = error.get("message") if isinstance(error, dict) else None
    said = str(message or "it does not say why")
    return fail(f"the server failed: {said}", "ask again; `tinsmith logs` has the server's log", FAILED)
