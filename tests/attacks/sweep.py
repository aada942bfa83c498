"""Sends hostile requests and looks at what comes back, and at what stays behind.

It says for each request what is wrong about its answer: another status than the stated one, above all a 5xx; another
shape than the errors of its route; a field that is not named; more text than an error needs; a path, a traceback or a
key in it; too long a wait. Not responsible for which requests there are (`catalogue`) or for the server.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from app.error_shapes import ANTHROPIC_PATHS, ANTHROPIC_PREFIXES, OPENAI_PREFIXES
from tests.attacks.catalogue.case import BASE_MODEL, Case, Targets

API = "/api/v1/"
MOST_TEXT = 6_000
"""Bytes of an error. What a caller sent is quoted in part only."""
MOST_SECONDS = 10.0
"""For one refusal, on a machine that may do much else at the time."""
INSIDES = re.compile(r"Traceback|File \"|site-packages|\.py\b|/root/|/home/|/tmp/|0x[0-9a-f]{8}| object at ")
"""What an answer never shows: tracebacks, files of the server, objects of the interpreter."""
ROWS = ("projects", "api_keys", "sessions", "runs", "samplers", "checkpoints", "custom_losses", "operations")


@dataclass
class Report:
    """How many requests of each kind were sent, and what was wrong about which."""

    tried: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0


@dataclass(frozen=True)
class Attacker:
    """A caller with a key. `secrets` are texts that no answer may show: keys, and folders of the server."""

    client: httpx.AsyncClient
    root: str
    key: str
    targets: Targets
    secrets: Sequence[str]

    async def send(self, case: Case) -> httpx.Response:
        """One request, exactly as the case says it."""
        path, content, headers = case.sent(self.targets)
        url = self.root + (path if path.startswith("/") else API + path)
        key = {"X-API-Key": self.key} if case.key else {}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in {**key, **headers}.items()]
        request = httpx.Request(case.method, url, headers=raw, content=content)
        return await self.client.send(request)

    async def sweep(self, kind: str, cases: Iterable[Case], report: Report) -> None:
        """Send all cases, one after the other, and note what is wrong."""
        for case in cases:
            began = time.monotonic()
            answer = await self.send(case)
            took = time.monotonic() - began
            report.tried[kind] += 1
            report.statuses[answer.status_code] += 1
            report.slowest = max(report.slowest, took)
            found = list(self.complaints(case, answer))
            if took > MOST_SECONDS:
                found.append(f"took {took:.1f} s")
            if found:
                report.wrong.append(f"[{kind}] {case.what}: {'; '.join(found)}: {answer.text[:300]!r}")

    def complaints(self, case: Case, answer: httpx.Response) -> Iterable[str]:
        """What is not as it was stated."""
        if answer.status_code not in case.status:
            yield f"{answer.status_code} instead of {case.status}"
        if answer.status_code < 400:
            return
        if answer.headers.get("content-length") != str(len(answer.content)):
            yield "no Content-Length"
        if len(answer.content) > MOST_TEXT:
            yield f"{len(answer.content)} bytes of error"
        yield from self.leaks(answer.text)
        error = shape(urlsplit(str(answer.url)).path, answer.json())
        if error is None:
            yield "another shape than the errors of this route"
            return
        message, named, category = error
        if category == "server":
            yield "the server says that it is at fault"
        if case.field is not None and not _is(named, case.field):
            yield f"field {named!r} instead of {case.field!r}"
        if case.says not in message:
            yield f"does not say {case.says!r}"

    def leaks(self, text: str) -> Iterable[str]:
        """What of the server's inside a text shows."""
        found = INSIDES.search(text)
        if found is not None:
            yield f"shows {found.group()!r}"
        yield from (f"shows a secret ({len(secret)} characters)" for secret in self.secrets if secret in text)


def shape(path: str, body: Any) -> tuple[str, str | None, str] | None:
    """Message, field and category of an error in the form that the clients of `path` read; None if it has another."""
    if path.startswith((*ANTHROPIC_PREFIXES, *ANTHROPIC_PATHS)):
        if set(body) != {"type", "error", "request_id"} or set(body["error"]) != {"type", "message"}:
            return None
        return body["error"]["message"], None, "server" if body["error"]["type"] == "api_error" else "user"
    if any(path.startswith(f"{prefix}/") for prefix in OPENAI_PREFIXES):
        if set(body) != {"error"} or set(body["error"]) != {"message", "type", "param", "code"}:
            return None
        kind = "server" if body["error"]["type"] == "server_error" else "user"
        return body["error"]["message"], body["error"]["param"], kind
    if set(body) != {"detail", "error"}:
        return None
    if set(body["error"]) != {"code", "category", "field", "hint", "request_id"}:
        return None
    return body["detail"], body["error"]["field"], body["error"]["category"]


def _is(named: str | None, field: str) -> bool:
    return named is not None and (named == field or named.startswith((f"{field}.", f"{field}[")))


def footprint(data_dir: Path) -> dict[str, Any]:
    """What there is: rows of each kind, and the files of the data folder besides the database's own."""
    connection = sqlite3.connect(f"file:{data_dir / 'tinsmith.db'}?mode=ro", uri=True, timeout=30)
    try:
        rows = {name: connection.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in ROWS}
    finally:
        connection.close()
    files = sorted(
        str(path.relative_to(data_dir))
        for path in data_dir.rglob("*")
        if path.is_file() and not path.name.startswith("tinsmith.db")
    )
    return {**rows, "files": files}


async def result(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    """Submit a request with an honest client (rooted at the API), and wait for its outcome, whatever it is."""
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    request_id = answer.json()["request_id"]
    while True:
        outcome = await client.post("retrieve_future", json={"request_id": request_id})
        if outcome.status_code != 408:
            assert outcome.status_code == 200, outcome.text
            return dict(outcome.json())


async def targets(client: httpx.AsyncClient) -> Targets:
    """Everything that can be aimed at, made by an honest client."""
    from tests.attacks.catalogue.losses import PLACE, node, output

    session = (await client.post("create_session", json={"sdk_version": "test"})).json()["session_id"]
    made = await result(
        client,
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model=BASE_MODEL,
        lora_config={"rank": 4, "seed": 1},
    )
    model = made["model_id"]
    sampler = await result(client, "save_weights_for_sampler", model_id=model, sampling_session_seq_id=0)
    path = (await result(client, "save_weights", model_id=model, path="kept"))["path"]
    await result(client, "save_weights_external", model_id=model, path="out")
    run = f"training_runs/{model}/checkpoints/external_weights/out"
    urls = (await client.get(f"{run}/external_weights_urls")).json()["urls"]
    archive = (await client.get(f"{run}/archive")).headers["location"]
    inputs = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
    nodes = [
        PLACE,
        {**PLACE, "name": "weights", "target": "weights"},
        node("m", "operator.mul", [{"ref": "logprobs"}, {"ref": "weights"}]),
        node("n", "sum", [{"ref": "m"}], "call_method"),
        output(),
    ]
    body = {"session_id": session, "custom_loss_seq_id": 0, "name": "x", "inputs": inputs, "graph": {"nodes": nodes}}
    loss = await client.post("create_custom_loss", json=body)
    assert loss.status_code == 200, loss.text
    return Targets(
        session=session,
        model=model,
        sampler=sampler["sampling_session_id"],
        path=path,
        export=_address(urls["adapter_model.safetensors"]),
        archive=_address(archive),
        loss=(await _outcome(client, loss))["loss_id"],
    )


async def _outcome(client: httpx.AsyncClient, promised: httpx.Response) -> dict[str, Any]:
    """Of an upload, which may be answered at once."""
    body: dict[str, Any] = promised.json()
    while "request_id" in body and "loss_id" not in body:
        outcome = await client.post("retrieve_future", json={"request_id": body["request_id"]})
        if outcome.status_code != 408:
            return dict(outcome.json())
    return body


def _address(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"


BATCH = [
    {
        "model_input": [5, 6, 7, 8],
        "loss_fn_inputs": {"target_tokens": [6, 7, 8, 9], "weights": [1.0, 1.0, 1.0, 1.0]},
    }
]


@dataclass
class Honest:
    """A client of another project, which trains: nothing that others do may change a bit of it."""

    client: httpx.AsyncClient
    model: str

    @classmethod
    async def begin(cls, client: httpx.AsyncClient) -> Honest:
        """A model with one step behind it and a gradient that waits for the next."""
        session = (await client.post("create_session", json={"sdk_version": "test"})).json()["session_id"]
        lora = {"rank": 4, "seed": 7}
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": lora}
        made = cls(client, (await result(client, "create_model", **body))["model_id"])
        await made.train()
        await made._do("forward_backward", data=BATCH, loss_fn="cross_entropy")
        return made

    async def train(self) -> None:
        """One step."""
        await self._do("forward_backward", data=BATCH, loss_fn="cross_entropy")
        await self.step()

    async def round(self) -> None:
        """The step on what is accumulated, and a gradient that waits for the next."""
        await self.step()
        await self._do("forward_backward", data=BATCH, loss_fn="cross_entropy")

    async def step(self) -> Any:
        """The step on what is accumulated; returns its metrics."""
        return (await self._do("optim_step", adam_params={"learning_rate": 0.01}))["metrics"]

    async def scores(self) -> Any:
        """What the model has become."""
        outcome = await self._do("forward", data=BATCH, loss_fn="cross_entropy")
        return [each["logprobs"]["data"] for each in outcome["loss_fn_outputs"]]

    async def ending(self) -> list[Any]:
        """Everything that can be seen of it, through one more step."""
        return [await self.scores(), await self.step(), await self.scores()]

    async def _do(self, route: str, **body: Any) -> dict[str, Any]:
        outcome = await result(self.client, route, model_id=self.model, **body)
        assert "error" not in outcome, outcome
        return outcome
