"""What a client program asks for, over HTTP with the key: runs that learn, checkpoints, work that waits or fails."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass
class Client:
    """A client of a running server that numbers its requests as the SDK does."""

    http: httpx.Client
    model: str

    @classmethod
    def of(cls, url: str, key: str) -> Client:
        """A client of the server's first base model."""
        http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=120)
        models = http.get("get_server_capabilities").json()["supported_models"]
        return cls(http, models[0]["model_name"])

    def post(self, route: str, /, **body: Any) -> dict[str, Any]:
        """A request that is accepted."""
        answer = self.http.post(route, json=body)
        assert answer.status_code == 200, f"{route}: {answer.text}"
        return dict(answer.json())

    def outcome(self, request_id: str, seconds: float = 300) -> dict[str, Any]:
        """What came of a request."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            answer = self.http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                return dict(answer.json())
        raise AssertionError(f"{request_id} has no outcome after {seconds:.0f} s")

    def do(self, route: str, /, **body: Any) -> dict[str, Any]:
        """A request that succeeds, and its result."""
        found = self.outcome(self.post(route, **body)["request_id"])
        assert "error" not in found, found
        return found

    def session(self, name: str | None = None, **metadata: str) -> str:
        """A new session."""
        named = {} if name is None else {"display_name": name}
        return str(self.post("create_session", user_metadata=metadata, **named)["session_id"])

    def run(self, session: str, number: int = 0, rank: int = 8, **metadata: str) -> str:
        """A new training run."""
        body: dict[str, Any] = {"session_id": session, "model_seq_id": number, "base_model": self.model}
        body |= {"lora_config": {"rank": rank, "seed": 7}, "user_metadata": metadata}
        return str(self.do("create_model", **body)["model_id"])

    def tokens(self, prompt: str, completion: str) -> dict[str, Any]:
        """A cross-entropy example in which only the completion counts."""
        return self._example({"prompt": prompt, "completion": completion})

    def chat(self, question: str, answer: str) -> dict[str, Any]:
        """A cross-entropy example of a chat in which only the answer counts."""
        item = {"messages": [{"role": "user", "content": question}], "completion": answer}
        return self._example(item)

    def _example(self, item: dict[str, Any]) -> dict[str, Any]:
        [found] = self.post("tokenize", model=self.model, items=[item])["items"]
        first, second = found["prompt_tokens"], found["completion_tokens"]
        every = [*first, *second]
        weights = [0.0] * (len(first) - 1) + [1.0] * len(second)
        inputs = {"target_tokens": every[1:], "weights": weights}
        return {"model_input": every[:-1], "loss_fn_inputs": inputs}

    def step(self, run: str, data: list[dict[str, Any]], rate: float, loss: str = "cross_entropy") -> dict[str, Any]:
        """A forward_backward and an optimizer step."""
        found = self.do("forward_backward", model_id=run, data=data, loss_fn=loss)
        self.do("optim_step", model_id=run, adam_params={"learning_rate": rate})
        return found

    def save(self, run: str, name: str) -> str:
        """A checkpoint for sampling; its path."""
        return str(self.do("save_weights_for_sampler", model_id=run, path=name)["path"])
