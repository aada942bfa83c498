"""Errors in the shapes that clients of other protocols read: OpenAI's and Anthropic's.

Responsible for which path speaks which protocol. Pure; not responsible for what went wrong (`errors.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPENAI_PREFIXES = ("/oai/api/v1", "/v1")
ANTHROPIC_PREFIXES = ("/anthropic/api/v1",)
ANTHROPIC_PATHS = ("/v1/messages",)
"""For clients whose base address is the server's own: their other paths begin with /v1 as well."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_PARAMS = {"num_samples": "n", "topk_sample_logprobs": "top_logprobs", "topk_prompt_logprobs": "logprobs"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def shaped(path: str, status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of an error answer to `path`; `body` is Tinsmith's own form of it."""
    if _below(path, (*ANTHROPIC_PREFIXES, *ANTHROPIC_PATHS)):
        return anthropic_error(status, body)
    if _below(path, OPENAI_PREFIXES):
        return openai_error(status, body)
    return body


def openai_error(status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = body["error"]
    return {"error": {"message": body["detail"], "type": kind, "param": _param(error["field"]), "code": error["code"]}}


def anthropic_error(status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": body["detail"]}
    return {"type": "error", "error": error, "request_id": body["error"]["request_id"]}


def _param(field: str | None) -> str | None:
    """A field of Tinsmith's own requests as these clients call it."""
    return None if field is None else _PARAMS.get(field, field.removeprefix("sampling_params."))


def _below(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
