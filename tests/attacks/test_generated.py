"""Requests that schemathesis makes up from the server's own description: valid ones, and ones that break it somewhere.

Whatever is sent, the answer is no 5xx, and of a status, a type and a shape that the description has. The variable
`TINSMITH_EXAMPLES` says how many requests of each kind every operation gets.
"""

from __future__ import annotations

import os
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python.asgi import get_client
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.main import create_app
from app.settings import Settings
from tests.attacks.catalogue.case import BASE_MODEL
from tests.support.api import Groups

EXAMPLES = int(os.environ.get("TINSMITH_EXAMPLES", "8"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDS_THE_KEY = "delete_own_api_key"
HOST = "testserver"
SECONDS = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


class Caller:
    """An honest client in this process, without an event loop of its own."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.headers = {"X-API-Key": app.state.dev_key}

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        with get_client(self.app) as client:
            answer = client.post(f"http://{HOST}/api/v1/{route}", json=body, headers=self.headers)
        assert answer.status_code in (200, 408), answer.text
        return {**answer.json(), "status_code": answer.status_code}

    def do(self, route: str, **body: Any) -> dict[str, Any]:
        request_id = self.post(route, **body)["request_id"]
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            outcome = self.post("retrieve_future", request_id=request_id)
            if outcome["status_code"] == 200:
                return {**outcome, "request_id": request_id}
            time.sleep(0.02)
        raise AssertionError(f"{route} did not end")


def _known(caller: Caller) -> dict[str, Any]:
    """Names of things that are there, so that half of the requests get behind the look-up."""
    session = caller.post("create_session")["session_id"]
    made = caller.do(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model=BASE_MODEL,
        lora_config={"rank": 4, "seed": 1},
    )
    model = made["model_id"]
    path = caller.do("save_weights", model_id=model, path="w")["path"]
    caller.do("save_weights_external", model_id=model, path="e")
    sampler = caller.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=0)["sampling_session_id"]
    return {
        "session_id": session,
        "model_id": model,
        "training_run_id": model,
        "request_id": made["request_id"],
        "sampling_session_id": sampler,
        "sampler_id": sampler,
        "base_model": BASE_MODEL,
        "model": BASE_MODEL,
        "tinker_path": path,
        "source_path": path,
        "checkpoint_id": "weights/w",
        "loss_fn": "cross_entropy",
    }


def _with_known(case: Any, known: dict[str, Any]) -> None:
    for part in (case.body, case.path_parameters, case.query):
        if isinstance(part, dict):
            part.update({name: known[name] for name in part if name in known and isinstance(part[name], str)})


@pytest.fixture(scope="module")
def described(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Caller]:
    """The description, without its keys: every request has a good one. The application lives until the process ends."""
    options = Settings(
        data_dir=tmp_path_factory.mktemp("described") / "data",
        base_model=[f"{BASE_MODEL}={tiny_folder}"],
        shutdown_grace=1.0,
        allowed_hosts=[HOST],
        poll_hold=0.01,
    )
    app = create_app(options, group_factory=Groups(options.data_dir))
    schemathesis.openapi.from_asgi("/openapi.json", app)  # starts it
    plain = deepcopy(app.openapi())
    plain["components"].pop("securitySchemes")
    for methods in plain["paths"].values():
        for operation in methods.values():
            operation.pop("security", None)
            # Described as one text, as readers of OpenAPI 3.1 take it; schemathesis takes that for one event.
            for answer in operation["responses"].values():
                answer.get("content", {}).pop("text/event-stream", None)
    schema = schemathesis.openapi.from_dict(plain)
    schema.app = app
    return schema, Caller(app)


def test_no_request_of_the_description_is_the_servers_fault(described: tuple[Any, Caller]) -> None:
    schema, caller = described
    known, sent, wrong = _known(caller), 0, []
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.definition.raw["operationId"] == ENDS_THE_KEY:
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.body or any(operation.iter_parameters())):
                continue

            @seed(0)
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                nonlocal sent
                sent += 1
                if sent % 2:
                    _with_known(case, known)
                answer = case.call(headers=caller.headers)
                try:
                    case.validate_response(answer, checks=CHECKS)
                except Exception as error:
                    wrong.append(f"{case.method} {case.formatted_path} {answer.status_code}: {error}"[:2000])

            send()
    assert sent > 100
    assert not wrong, "\n\n".join(wrong[:20])
