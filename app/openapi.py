"""The OpenAPI description: full schemas also where a route reads or writes bytes itself.

    python -m app.openapi [FILE]     writes openapi.yaml

FastAPI describes what it parses. Bodies, which the routes read by themselves, and futures, whose result depends on what
was asked, are added here. Not responsible for serving anything.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI, Security
from fastapi.openapi.utils import get_openapi
from fastapi.security import APIKeyHeader
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.codec.multipart import MULTIPART
from schemas import requests, responses
from schemas.http.anthropic import AnthropicErrorResponse, CountTokensRequest, MessagesRequest
from schemas.http.openai import ChatCompletionRequest, CompletionRequest, OpenAIErrorResponse
from schemas.responses import ErrorResponse

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
REF = "#/components/schemas/{model}"

KEY = Security(APIKeyHeader(name="X-API-Key", scheme_name="ApiKey", description="A key `tml-...`.", auto_error=False))
"""Describes the key. `app.auth.AuthMiddleware` enforces it, before the route is reached."""


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


def _answer(model: type[BaseModel], description: str) -> dict[str, Any]:
    """By reference: FastAPI would build what reads the model anew for every route, half of the time of a start."""
    return {"description": description, "content": {JSON: {"schema": _ref(model)}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: _answer(ErrorResponse, description)
    for status, description in {
        400: "The request cannot be honoured; `error.field` names what is wrong.",
        401: "The API key is missing or not valid.",
        403: "The key lacks a permission; the message names it, and the roles that have it.",
        404: "The object does not exist, or belongs to another project.",
        410: "The object is over: a finished session, an expired result, a lost training run.",
        413: "The body is too large.",
        415: "The Content-Type or Content-Encoding is not read here.",
        500: "The server is at fault; its log has the details under `error.request_id`.",
        503: "The server is starting or stopping; try again after `Retry-After` seconds.",
    }.items()
}

_TOO_MANY = "Too many samples of the project are open; try again after `Retry-After` seconds."


def _errors_of(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    told = {**{status: each["description"] for status, each in ERRORS.items()}, 429: _TOO_MANY}
    return {status: _answer(model, description) for status, description in told.items()}


OPENAI_ERRORS = _errors_of(OpenAIErrorResponse)
ANTHROPIC_ERRORS = _errors_of(AnthropicErrorResponse)

EVENT_STREAMS = frozenset({"openai_completions", "openai_chat_completions", "anthropic_messages"})
"""By operation id: answered with events if the body says `stream: true`."""

RAW_BODIES: dict[str, type[BaseModel]] = {
    "client_config": requests.ClientConfigRequest,
    "client_dynamic_config": requests.ClientConfigRequest,
    "create_session": requests.CreateSessionRequest,
    "session_heartbeat": requests.SessionHeartbeatRequest,
    "search_sessions": requests.SessionSearchRequest,
    "set_session_project": requests.SetSessionProjectRequest,
    "add_base_model": requests.AddBaseModelRequest,
    "set_project_limits": requests.SetLimitsRequest,
    "set_key_limits": requests.SetLimitsRequest,
    "auth_token": requests.AuthTokenRequest,
    "create_key": requests.CreateKeyRequest,
    "rotate_key": requests.RotateKeyRequest,
    "admin_create_project": requests.CreateProjectRequest,
    "admin_create_key": requests.CreateKeyRequest,
    "admin_rotate_key": requests.RotateKeyRequest,
    "admin_set_member": requests.SetMemberRequest,
    "admin_create_user": requests.CreateUserRequest,
    "finish_session": requests.FinishSessionRequest,
    "telemetry": requests.TelemetryRequest,
    "forward_backward": requests.ForwardBackwardRequest,
    "forward": requests.ForwardBackwardRequest,
    "optim_step": requests.OptimStepRequest,
    "zero_grad": requests.ZeroGradRequest,
    "create_model": requests.CreateModelRequest,
    "create_custom_loss": requests.CreateCustomLossRequest,
    "get_info": requests.GetInfoRequest,
    "save_weights": requests.SaveWeightsRequest,
    "load_weights": requests.LoadWeightsRequest,
    "save_weights_for_sampler": requests.SaveWeightsForSamplerRequest,
    "save_weights_external": requests.SaveWeightsExternalRequest,
    "asample": requests.SampleRequest,
    "tokenize": requests.TokenizeRequest,
    "create_sampling_session": requests.CreateSamplingSessionRequest,
    "join_sampling_session": requests.JoinSamplingSessionRequest,
    "retrieve_future": requests.RetrieveFutureRequest,
    "retrieve_futures": requests.RetrieveFuturesRequest,
    "cancel_future": requests.CancelFutureRequest,
    "copy_weights": requests.CopyWeightsRequest,
    "unload_model": requests.UnloadModelRequest,
    "weights_info": requests.WeightsInfoRequest,
    "set_checkpoint_ttl": requests.SetTtlRequest,
    "openai_completions": CompletionRequest,
    "openai_chat_completions": ChatCompletionRequest,
    "anthropic_messages": MessagesRequest,
    "anthropic_count_tokens": CountTokensRequest,
}
"""By operation id. The routes parse bodies by themselves, strictly: FastAPI would take a key that is given twice."""

OPTIONAL_BODIES = frozenset(
    {"auth_token", "rotate_key", "admin_rotate_key", "client_config", "client_dynamic_config", "finish_session"}
)

FORMS: dict[str, tuple[type[BaseModel], str]] = {
    "import_checkpoint": (requests.ImportCheckpointRequest, "adapter_model"),
}
"""By operation id: the fields of a multipart form, and its file."""

PROTOBUF_BODIES = {"forward_backward": "ForwardBackwardRequest"}

FUTURE_RESULTS: tuple[type[BaseModel], ...] = (
    responses.ForwardBackwardOutput,
    responses.SampleResponse,
    responses.ZeroGradResult,
    responses.CreateModelResult,
    responses.LoadWeightsResult,
    responses.SaveWeightsResult,
    responses.SaveWeightsForSamplerResult,
    responses.SaveWeightsExternalResult,
    responses.UnloadModelResult,
    responses.CompleteMetadata,
    responses.FailedFuture,
    responses.OptimStepResult,
)
"""The one result that requires no field comes last: generated clients take the first one that fits."""


def install(app: FastAPI) -> None:
    """Make `app.openapi()` give the full description."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def build(app: FastAPI) -> dict[str, Any]:
    """The description of everything that `app` serves."""
    schema = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description="Requests that take time answer with a `request_id`; `retrieve_future` gives their result.",
        routes=app.routes,
    )
    schemas: dict[str, Any] = schema.setdefault("components", {}).setdefault("schemas", {})
    _add_models(schemas)
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # a request that does not validate is answered 400
            name = operation["operationId"]
            if name in RAW_BODIES:
                operation["requestBody"] = _body(name)
            if name in FORMS:
                operation["requestBody"] = _form(name)
            if name in EVENT_STREAMS:
                operation["responses"]["200"]["content"]["text/event-stream"] = {
                    "schema": {"type": "string", "description": "Server-sent events, with `stream: true`."}
                }
            if name == "retrieve_future":
                _describe_future(operation)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schema["components"]["schemas"] = dict(sorted(schemas.items()))
    return schema


def to_yaml(schema: Mapping[str, Any]) -> str:
    """The text of `openapi.yaml`."""
    head = "# Generated by `make docs` from the code; a test compares the two.\n"
    return head + yaml.safe_dump(dict(schema), sort_keys=False, allow_unicode=True, width=120)


def _add_models(schemas: dict[str, Any]) -> None:
    bodies = [(model, "validation") for model in RAW_BODIES.values()]
    answers = (*FUTURE_RESULTS, responses.TryAgain, ErrorResponse, OpenAIErrorResponse, AnthropicErrorResponse)
    results = [(model, "serialization") for model in answers]
    _, definitions = models_json_schema(
        [*dict.fromkeys(bodies), *dict.fromkeys(results)],  # type: ignore[list-item]
        ref_template=REF,
    )
    for name, definition in definitions.get("$defs", {}).items():
        schemas.setdefault(name, definition)


def _body(name: str) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": _ref(RAW_BODIES[name])}}
    if name in PROTOBUF_BODIES:
        content[PROTOBUF] = {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": f"`{PROTOBUF_BODIES[name]}` of schemas/proto/tinker_public.proto; "
                "`Content-Encoding: zstd` is read.",
            }
        }
    return {"required": name not in OPTIONAL_BODIES, "content": content}


def _form(name: str) -> dict[str, Any]:
    model, file = FORMS[name]
    fields = model.model_json_schema(ref_template=REF)
    fields["properties"][file] = {"type": "string", "format": "binary", "description": "adapter_model.safetensors."}
    fields["required"] = [*fields.get("required", []), file]
    return {"required": True, "content": {MULTIPART: {"schema": fields}}}


def _describe_future(operation: dict[str, Any]) -> None:
    operation["responses"]["200"] = {
        "description": "The result of what was asked, its size, or its failure (then there is an `error`).",
        "content": {
            JSON: {"schema": {"oneOf": [_ref(model) for model in FUTURE_RESULTS]}},
            PROTOBUF: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": "`ForwardBackwardOutput` or `SampleResponse`, if the request accepts protobuf.",
                }
            },
        },
    }
    operation["responses"]["408"] = {
        "description": "Not done yet; ask again at once.",
        "content": {JSON: {"schema": _ref(responses.TryAgain)}},
    }


def main() -> None:
    """Write the description of this version."""
    from app.main import create_app
    from app.settings import Settings

    target = Path(sys.argv[1] if len(sys.argv) > 1 else "openapi.yaml")
    target.write_text(to_yaml(create_app(Settings()).openapi()), encoding="utf-8")


if __name__ == "__main__":
    main()
