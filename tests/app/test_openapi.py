"""The description is complete, valid in itself, and what the repository holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.main import create_app
from app.openapi import to_yaml
from app.settings import Settings
from schemas import responses
from schemas.http.base import ResponseModel
from schemas.requests import OptimStepRequest

ROOT = Path(__file__).parents[2]
PUBLIC = {"healthz", "readyz", "download_file", "download_session_trace"}
FORMS = {"import_checkpoint"}
BODILESS = {"publish_checkpoint"}
SHAPES = {"oai": "OpenAIErrorResponse", "anthropic": "AnthropicErrorResponse"}
"""Errors of the routes for clients of other protocols."""


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return create_app(Settings()).openapi()


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_the_file_is_up_to_date(described: dict[str, Any]) -> None:
    assert (ROOT / "openapi.yaml").read_text() == to_yaml(described), "run `make docs`"


def test_every_reference_resolves_and_every_schema_is_used(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    used: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "$ref":
                    name = value.removeprefix("#/components/schemas/")
                    assert name in schemas, value
                    used.add(name)
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(described)
    assert set(schemas) == used


def test_operation_ids_are_stable_names(described: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(described)]
    assert len(set(ids)) == len(ids)
    for name in ids:
        assert name.replace("_", "").isalpha(), name


def test_every_post_has_a_body_and_every_operation_its_errors_and_key(described: dict[str, Any]) -> None:
    for path, method, operation in operations(described):
        public = operation["operationId"] in PUBLIC
        assert bool(operation.get("security")) is not public, path
        assert operation.get("summary"), path
        assert "422" not in operation["responses"], path
        if method in ("post", "put") and operation["operationId"] not in BODILESS:
            content = operation["requestBody"]["content"]
            kind = "multipart/form-data" if operation["operationId"] in FORMS else "application/json"
            assert content[kind]["schema"], path
        if public:
            continue
        shape = SHAPES.get(path.split("/")[1], "ErrorResponse")
        for status in ("400", "401", "404", "413", "503"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{shape}"}, (path, status)


def test_every_success_is_described_or_empty(described: dict[str, Any]) -> None:
    for path, _, operation in operations(described):
        successes = {code: answer for code, answer in operation["responses"].items() if code.startswith(("2", "3"))}
        assert successes, path
        for code, answer in successes.items():
            if code in ("204", "302") or operation["operationId"] in ("finish_session",):
                continue
            for content in answer["content"].values():
                assert content["schema"], path


def test_forward_backward_takes_json_and_protobuf(described: dict[str, Any]) -> None:
    content = described["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ForwardBackwardRequest"}
    assert content["application/x-protobuf"]["schema"]["format"] == "binary"


def test_a_future_is_one_of_the_results(described: dict[str, Any]) -> None:
    answers = described["paths"]["/api/v1/retrieve_future"]["post"]["responses"]
    names = {ref["$ref"].rpartition("/")[2] for ref in answers["200"]["content"]["application/json"]["schema"]["oneOf"]}
    assert {"ForwardBackwardOutput", "SampleResponse", "OptimStepResult", "FailedFuture"} <= names
    assert answers["200"]["content"]["application/x-protobuf"]
    assert answers["408"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/TryAgain"}


def test_a_generated_client_takes_each_result_for_what_it_is(described: dict[str, Any]) -> None:
    """Such a client tries the results in order, and takes the first whose required fields and constants are there."""
    answers = described["paths"]["/api/v1/retrieve_future"]["post"]["responses"]
    refs = answers["200"]["content"]["application/json"]["schema"]["oneOf"]
    candidates = {
        name: described["components"]["schemas"][name] for name in (r["$ref"].rpartition("/")[2] for r in refs)
    }

    def taken_for(result: dict[str, Any]) -> str:
        for name, schema in candidates.items():
            constants = {key: value["const"] for key, value in schema["properties"].items() if "const" in value}
            if set(schema.get("required", ())) <= set(result) and constants.items() <= result.items():
                return name
        raise AssertionError(result)

    results: list[ResponseModel] = [
        responses.ForwardBackwardOutput(loss_fn_outputs=[], metrics={"loss:sum": 1.0}),
        responses.SampleResponse(sequences=[]),
        responses.OptimStepResult(metrics={"grad_norm": 1.0}),
        responses.ZeroGradResult(),
        responses.CreateModelResult(model_id="m"),
        responses.LoadWeightsResult(model_id="m"),
        responses.SaveWeightsResult(path="p"),
        responses.SaveWeightsForSamplerResult(path="p"),
        responses.SaveWeightsExternalResult(path="p", size_bytes=1),
        responses.UnloadModelResult(model_id="m"),
        responses.CompleteMetadata(response_payload_size=1),
        responses.FailedFuture(error="e", category="user"),
    ]
    assert {type(result).__name__ for result in results} == set(candidates)
    for result in results:
        assert taken_for(result.model_dump(exclude_none=True)) == type(result).__name__


def test_a_body_of_defaults_gives_no_hyperparameter_twice(described: dict[str, Any]) -> None:
    """A generated client sends every default of the description along with what its caller gave."""
    schemas = described["components"]["schemas"]

    def with_defaults(name: str, given: dict[str, Any]) -> dict[str, Any]:
        fields = schemas[name]["properties"].items()
        return {**{key: value["default"] for key, value in fields if value.get("default") is not None}, **given}

    nested = with_defaults("AdamParams", {"lr": 0.5, "betas": [0.1, 0.2]})
    request = OptimStepRequest.model_validate(
        with_defaults("OptimStepRequest", {"model_id": "m", "adam_params": nested})
    )
    assert (request.learning_rate, request.beta1, request.beta2) == (0.5, 0.1, 0.2)
    assert schemas["AdamParams"]["properties"]["learning_rate"]["description"] == "Step size. Absent: 0.0001."


def test_every_list_says_of_what(described: dict[str, Any]) -> None:
    def walk(node: Any, where: str) -> None:
        if isinstance(node, dict):
            if node.get("type") == "array":
                assert "items" in node or "prefixItems" in node, where
            for key, value in node.items():
                walk(value, f"{where}/{key}")
        elif isinstance(node, list):
            for index, value in enumerate(node):
                walk(value, f"{where}/{index}")

    walk(described, "")


def test_the_key_is_a_security_scheme(described: dict[str, Any]) -> None:
    [scheme] = described["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["in"], scheme["name"]) == ("apiKey", "header", "X-API-Key")


def test_primitives_are_routes(described: dict[str, Any]) -> None:
    for name in (
        "client/config",
        "client/dynamic_config",
        "create_session",
        "session_heartbeat",
        "sessions/{session_id}/finish",
        "telemetry",
        "create_model",
        "get_info",
        "forward_backward",
        "forward",
        "optim_step",
        "zero_grad",
        "save_weights",
        "load_weights",
        "save_weights_for_sampler",
        "create_sampling_session",
        "asample",
        "retrieve_future",
    ):
        assert f"/api/v1/{name}" in described["paths"], name
