"""Turn whatever goes wrong into one JSON shape.

    {"detail": "...", "error": {"code", "category", "field", "hint", "request_id"}}

The routes for clients of other protocols answer in the shapes that those clients read (`error_shapes.py`).

Responsible for rendering; what can go wrong is in `schemas/errors.py`. Every error is sent whole with a Content-Length
(the SDK takes a 400 without one for a broken proxy), and nothing of the server's inside (paths, tracebacks) is in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from app.error_shapes import shaped
from schemas.errors import (
    InvalidRequest,
    InvalidToken,
    PayloadTooLarge,
    TinsmithError,
    TooManyRequests,
    Unavailable,
    UnsupportedMediaType,
)

RETRY_AFTER_SECONDS = 2
MAX_PROBLEMS = 5
"""How many problems of one body a message names."""

_STATUS_CODES = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large", 415: "unsupported_media_type"}
_PART = re.compile(r"[A-Za-z0-9_.:-]+")


def error_body(error: TinsmithError, request_id: str | None) -> dict[str, Any]:
    """The JSON object that tells a client about `error`."""
    return _body(error.message, error.code, error.category, error.field, error.hint, request_id)


def render(error: TinsmithError, request_id: str | None, path: str) -> Response:
    """The HTTP answer for `error`, in the shape that the clients of `path` read."""
    headers: dict[str, str] = {}
    if error.status in (Unavailable.status, TooManyRequests.status):
        asked = getattr(error, "retry_after", None)
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS if asked is None else math.ceil(asked))
    if error.status == 401:
        invalid = ', error="invalid_token"' if isinstance(error, InvalidToken) else ""
        headers["WWW-Authenticate"] = f'Bearer realm="tinsmith"{invalid}'
    return _json(error.status, shaped(path, error.status, error_body(error, request_id)), headers)


def render_unexpected(request_id: str | None, path: str) -> Response:
    """The answer when the server itself is at fault; the log has the rest under the same request id."""
    message = "the server failed to handle this request; its log has the details under this request id"
    return _json(500, shaped(path, 500, _body(message, "internal", "server", None, None, request_id)), {})


def validation_error(problems: Sequence[Mapping[str, Any]], model: type[BaseModel] | None = None) -> InvalidRequest:
    """One `InvalidRequest` from pydantic's list of problems: each field's path, what is accepted and what came.

    Args:
        problems: what `ValidationError.errors()` or `RequestValidationError.errors()` returns.
        model: what the body was read as, so that the fields there are can be told of one that is none of them.
    """
    named = [(_field(problem["loc"]), problem) for problem in problems]
    parts = [_describe(field, problem, model) for field, problem in named[:MAX_PROBLEMS]]
    if len(named) > MAX_PROBLEMS:
        parts.append(f"and {len(named) - MAX_PROBLEMS} more")
    return InvalidRequest("; ".join(parts), field=named[0][0] or None)


def request_id_of(request: Request) -> str | None:
    """The id that the middleware gave to this HTTP request."""
    return getattr(request.state, "request_id", None)


def install(app: FastAPI) -> None:
    """Register the handlers. Unexpected exceptions are left to the middleware, which logs them."""
    app.add_exception_handler(TinsmithError, _on_tinsmith)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(ValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_tinsmith(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinsmithError)
    return render(error, request_id_of(request), request.url.path)


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError | ValidationError)
    problems = error.errors()
    whole_body = bool(problems) and tuple(problems[0]["loc"]) == ("body",)
    if whole_body and isinstance(problems[0].get("input"), bytes):
        sent = request.headers.get("content-type", "")[:100]
        return render(
            UnsupportedMediaType(
                f"Content-Type {sent!r} is not read here; send application/json", field="Content-Type"
            ),
            request_id_of(request),
            request.url.path,
        )
    return render(validation_error(problems), request_id_of(request), request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    request_id = request_id_of(request)
    if error.status_code == PayloadTooLarge.status:
        return render(PayloadTooLarge(str(error.detail)), request_id, request.url.path)
    code = _STATUS_CODES.get(error.status_code, "invalid_request" if error.status_code < 500 else "internal")
    category = "user" if error.status_code < 500 else "server"
    message, hint = str(error.detail), None
    if error.status_code == 404:
        message, hint = f"there is no {request.method} {request.url.path[:200]}", "see /docs for what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path[:200]} does not take {request.method}; it takes {allowed}"
    body = shaped(request.url.path, error.status_code, _body(message, code, category, None, hint, request_id))
    return _json(error.status_code, body, dict(error.headers or {}))


def _field(loc: Sequence[int | str]) -> str:
    """`("body", "data", 3, "tokens")` -> `data[3].tokens`; names of validators inside the path are left out."""
    parts = list(loc)
    if parts[:1] == ["body"] or (len(parts) > 1 and parts[0] in ("query", "path", "header")):
        parts = parts[1:]  # where it was; `path` alone is a field of that name
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PART.fullmatch(part):
            text += f".{part}" if text else part
    return text


def _fields(model: type[BaseModel] | None, loc: Sequence[int | str]) -> list[str]:
    """The fields of the object in which the last part of `loc` is; none if it cannot be told which kind it is."""
    kinds = [] if model is None else [model]
    for part in loc[:-1]:
        if isinstance(part, str):
            kinds = [one for kind in kinds for one in _models(_annotations(kind).get(part))]
        if len(kinds) != 1:
            return []
    return sorted(name for kind in kinds for name in _annotations(kind))


def _annotations(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _models(part)]


def _describe(field: str, problem: Mapping[str, Any], model: type[BaseModel] | None = None) -> str:
    kind = problem["type"]
    name = field or "the body"
    if kind == "json_invalid":
        reason = problem.get("ctx", {}).get("error", "syntax error")
        return f"the body is not valid JSON: {reason}"
    if kind == "missing":
        return f"{name} is required"
    if kind == "extra_forbidden":
        fields = ", ".join(_fields(model, problem["loc"]))
        accepted = f"; accepted are: {fields}" if fields else ""
        return f"{name} is not a field of this request (got {_short(problem.get('input'))}){accepted}"
    message = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message[:1].lower() + message[1:]
    if kind in ("value_error", "assertion_error"):
        return f"{name}: {message}"
    return f"{name}: {message}; got {_short(problem.get('input'))}"


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return f"an object with {len(value)} keys" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, str | bytes):
        value = value[:100]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _body(
    message: str, code: str, category: str, field: str | None, hint: str | None, request_id: str | None
) -> dict[str, Any]:
    detail = f"{message} ({hint})" if hint else message
    error = {"code": code, "category": category, "field": field, "hint": hint, "request_id": request_id}
    return {"detail": detail, "error": error}


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    # ASCII with escapes: a lone surrogate that a client sent and an error quotes cannot be encoded otherwise.
    return Response(json.dumps(body), status, dict(headers), media_type="application/json")
