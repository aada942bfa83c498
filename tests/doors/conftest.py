"""One real server on the tiny model, an adapter that knows one answer by heart, and the official clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from store.database import Store
from store.keys import create_key, ensure_project
from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

MODEL = "acme/tiny"
PLAIN = "acme/plain"
"""A model without a chat template."""
QUESTION = "Hi"
ANSWER = "Grüße 🙂 Ωμέγα!"
"""With characters of one to four bytes, each byte a token of the tiny model."""
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
END = 2
"""The token that ends a sequence."""


@dataclass(frozen=True)
class Doors:
    """The server, and the key of another project on it."""

    server: RunningServer
    other_key: str

    def http(self, key: str | None = None) -> httpx.Client:
        """A client without a protocol of its own."""
        headers = {"Authorization": f"Bearer {key or self.server.key}"}
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=60)

    def openai(self, key: str | None = None, prefix: str = "/v1") -> openai.OpenAI:
        """The official client of OpenAI."""
        return openai.OpenAI(base_url=self.server.url + prefix, api_key=key or self.server.key, max_retries=0)

    def anthropic(self, key: str | None = None, prefix: str = "/anthropic/api") -> anthropic.Anthropic:
        """The official client of Anthropic."""
        return anthropic.Anthropic(base_url=self.server.url + prefix, api_key=key or self.server.key, max_retries=0)


@pytest.fixture(scope="session")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """A `tinsmith serve` process with a model that chats and one that does not."""
    tiny = make_tiny_model(tmp_path_factory.mktemp("base") / "tiny", context_length=8192)
    plain = make_tiny_model(tmp_path_factory.mktemp("plain") / "tiny", seed=1)
    (plain / "chat_template.jinja").unlink()
    data_dir = tmp_path_factory.mktemp("server") / "data"
    key = asyncio.run(_other_key(data_dir))
    models = ["--base-model", f"{MODEL}={tiny}", "--base-model", f"{PLAIN}={plain}"]
    with serve(data_dir, [*models, "--threads", "1", "--shutdown-grace", "2"]) as server:
        yield Doors(server, key)


async def _other_key(data_dir: Path) -> str:
    store = await Store.open(data_dir)

    async def make(db: Any) -> str:
        return (await create_key(db, await ensure_project(db, "other"), "key"))[1]

    try:
        return await store.write(make)
    finally:
        await store.close()


class Training:
    """Training through the JSON routes."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        answer = self._client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def do(self, route: str, **body: Any) -> dict[str, Any]:
        """Submit, and wait for the result."""
        promise = self.post(route, **body)
        while True:
            answer = self._client.post("retrieve_future", json={"request_id": promise["request_id"]})
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                outcome = dict(answer.json())
                assert "error" not in outcome, outcome
                return outcome


def tokens_of(text: str) -> list[int]:
    """Of the tiny model: special tokens 0 to 2, then the bytes in the order of the byte-level alphabet."""
    from app.services.doors.tokens import _BYTES_OF

    order = {byte: 3 + place for place, (_, byte) in enumerate(sorted(_BYTES_OF.items()))}
    found: list[int] = []
    while text:
        for token, special in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
            if text.startswith(special):
                found.append(token)
                text = text[len(special) :]
                break
        else:
            found += [order[byte] for byte in text[0].encode()]
            text = text[1:]
    return found


@pytest.fixture(scope="session")
def knowing(doors: Doors) -> str:
    """The path of a sampler checkpoint that gives `ANSWER` to `PROMPT`."""
    with doors.server.client() as client:
        training = Training(client)
        session = training.post("create_session", sdk_version="test")["session_id"]
        run = training.do(
            "create_model",
            session_id=session,
            model_seq_id=0,
            base_model=MODEL,
            lora_config={"rank": 16, "seed": 1},
        )["model_id"]
        prompt, answer = tokens_of(PROMPT), [*tokens_of(ANSWER), END]
        whole = [*prompt, *answer]
        datum = {
            "model_input": whole[:-1],
            "loss_fn_inputs": {
                "target_tokens": whole[1:],
                "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
            },
        }
        loss, step = 1e9, 0
        while loss > 1.0:
            step += 1
            assert step < 400, loss
            result = training.do("forward_backward", model_id=run, data=[datum], loss_fn="cross_entropy")
            loss = result["metrics"]["loss:sum"]
            training.do("optim_step", model_id=run, adam_params={"learning_rate": 1e-2 if loss > 20 else 3e-3})
        return str(training.do("save_weights_for_sampler", model_id=run, path="knowing")["path"])
