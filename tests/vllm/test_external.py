"""The external sampler: against a real vLLM server where its environment exists, and against small servers whose
answers cannot be used."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engines.sampling.external import ExternalSampler
from engines.sampling.vllm.environment import VllmEnvironment, host_environment
from schemas.errors import EngineFailure, InvalidRequest, Unavailable
from schemas.operations import SamplingParams
from tests.vllm.conftest import CONTEXT, GREEDY, PROMPT, World, run, sample

pytestmark = pytest.mark.timeout(900)
BOUND = 4e-5
DRAWN = SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop=())


# -- a real vLLM server ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["raw_logprobs", "processed_logprobs"])
def server(
    request: pytest.FixtureRequest, world: World, vllm_environment: VllmEnvironment, tmp_path_factory: Any
) -> Iterator[str]:
    """The address of vLLM's own server, with one adapter known from the start."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options: dict[str, object] = {
        "model": world.folder,
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": CONTEXT,
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": 64 << 20,
        "max-lora-rank": 16,
        "logprobs-mode": request.param,
        "host": "127.0.0.1",
        "port": port,
    }
    command = [str(vllm_environment.python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    command += ["--enable-lora", "--lora-modules", f"known={world.folders['a']}"]
    env = host_environment({}, on_cpu=vllm_environment.on_cpu, threads=1)
    env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PATH": "/usr/bin:/bin"}
    log = Path(tmp_path_factory.mktemp("server")) / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, process_group=0)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=1, trust_env=False).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def external(server: str, world: World) -> Iterator[ExternalSampler]:
    sampler = ExternalSampler(server, "tiny", world.info, world.tokenizer, max_rows=4)
    yield sampler
    sampler.close()


@pytest.mark.vllm
def test_a_real_server_is_sampled_with_the_same_meaning(world: World, external: ExternalSampler) -> None:
    processed = external._server.logprobs == "processed"
    string = world.tokenizer.decode([run(external, x=sample(PROMPT)).sequence("x").tokens[2]])
    requests = {
        "greedy": sample(PROMPT, topk_sample_logprobs=3, stream=True),
        "drawn": sample(PROMPT, DRAWN, num_samples=2, plain_logprobs=True),
        "again": sample(PROMPT, DRAWN, num_samples=3),
        "stopped": sample(PROMPT, replace(GREEDY, max_tokens=200, stop=(string,))),
    }
    if processed:
        requests["cold"] = sample(PROMPT, replace(DRAWN, temperature=0.6))
    outcome = run(external, **requests)
    greedy = outcome.sequence("greedy")
    rows = world.forced(PROMPT + greedy.tokens.tolist())[len(PROMPT) - 1 : -1]
    assert greedy.tokens.tolist() == rows.argmax(-1).tolist()
    np.testing.assert_allclose(greedy.logprobs, rows.max(-1), atol=BOUND)
    assert greedy.topk is not None
    np.testing.assert_array_equal(greedy.topk.ids, np.argsort(-rows, axis=-1)[:, :3])
    assert [t for delta in outcome.deltas["greedy"] for t in delta.tokens.tolist()] == greedy.tokens.tolist()
    first, second = outcome.result("drawn").sequences
    for sequence in (first, second):
        expected = world.expected(PROMPT, sequence.tokens.tolist())
        np.testing.assert_allclose(sequence.logprobs, expected, atol=BOUND)
        assert sequence.plain_logprobs is not None
        np.testing.assert_allclose(sequence.plain_logprobs, expected, atol=BOUND)
    assert outcome.sequence("again", 1).tokens.tolist() == second.tokens.tolist()
    assert first.tokens.tolist() != second.tokens.tolist()
    stopped = outcome.sequence("stopped")
    assert stopped.stop_reason == "stop"
    assert world.tokenizer.decode(stopped.tokens.tolist()).endswith(string)
    if processed:
        cold = outcome.sequence("cold")
        expected = world.expected(PROMPT, cold.tokens.tolist(), temperature=0.6)
        np.testing.assert_allclose(cold.logprobs, expected, atol=2 * BOUND)


@pytest.mark.vllm
def test_adapters_are_found_by_their_folder_or_loaded(world: World, external: ExternalSampler) -> None:
    for name in ("a", "b"):
        sequence = run(external, x=sample(PROMPT, adapter_folder=world.folders[name])).sequence("x")
        expected = world.expected(PROMPT, sequence.tokens.tolist(), name)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=BOUND)
    assert external._server._adapters[world.folders["a"]] == "known"
    with pytest.raises(InvalidRequest, match="train_unembed"):
        external.add("x", sample(PROMPT, adapter_folder=world.folders["head"]))
    outcome = run(external, wide=sample(PROMPT, adapter_folder=world.folders["wide"]), good=sample(PROMPT))
    assert isinstance(outcome.ended["wide"], InvalidRequest)
    assert world.folders["wide"] not in outcome.ended["wide"].message
    assert outcome.sequence("good").tokens.shape == (5,)


@pytest.mark.vllm
def test_logprobs_that_would_mean_something_else_are_refused(world: World, external: ExternalSampler) -> None:
    if external._server.logprobs == "plain":
        cases = [(replace(DRAWN, temperature=0.6), "sampling_params.temperature")]
    else:
        cases = [
            (replace(DRAWN, top_k=4), "sampling_params.top_k"),
            (replace(DRAWN, top_p=0.9), "sampling_params.top_p"),
        ]
    for params, field in cases:
        with pytest.raises(InvalidRequest) as caught:
            external.add("x", sample(PROMPT, params))
        assert caught.value.field == field
    assert external.load.active == 0


@pytest.mark.vllm
def test_a_cancelled_request_ends_at_the_server_too(server: str, external: ExternalSampler) -> None:
    external.add("x", sample(PROMPT, replace(GREEDY, max_tokens=240)))
    while not external.step().ended and external.load.tokens <= len(PROMPT):
        pass
    external.cancel("x")
    assert external.load.active == 0
    deadline = time.monotonic() + 20
    while True:
        metrics = httpx.get(server.removesuffix("v1") + "metrics", trust_env=False).text
        running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
        if running and all(float(line.split()[-1]) == 0 for line in running):
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- servers that cannot be used, in this process --------------------------------------------------------------------
Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start a small HTTP server that answers as a function says; returns its address."""
    running: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def _reply(self, body: dict[str, Any]) -> None:
                status, content = answer(self.path, body)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *args: object) -> None:
                return

        found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=found.serve_forever, daemon=True).start()
        running.append(found)
        return f"http://127.0.0.1:{found.server_address[1]}/v1"

    yield start
    for found in running:
        found.shutdown()
        found.server_close()


MODELS = {"data": [{"id": "tiny"}]}
LOGPROBS = {"top_logprobs": [{"token_id:5": -0.5}], "token_logprobs": [-0.5], "tokens": ["token_id:5"]}


def connect(world: World, url: str) -> ExternalSampler:
    return ExternalSampler(url, "tiny", world.info, world.tokenizer)


def test_a_server_that_only_speaks_text_is_refused_when_connecting(
    world: World, serve: Callable[[Answer], str]
) -> None:
    url = serve(lambda path, body: (200, {"choices": [{"text": "x"}], **MODELS}))
    with pytest.raises(Unavailable, match="token ids"):
        connect(world, url)


def test_a_server_without_logprobs_is_refused_when_connecting(world: World, serve: Callable[[Answer], str]) -> None:
    choice = {"token_ids": [5], "prompt_token_ids": [0, 0]}
    url = serve(lambda path, body: (200, {"choices": [choice], **MODELS}))
    with pytest.raises(Unavailable, match="logprobs"):
        connect(world, url)


def test_a_server_with_other_models_is_refused_when_connecting(world: World, serve: Callable[[Answer], str]) -> None:
    url = serve(lambda path, body: (200, {"data": [{"id": "one"}, {"id": "two"}]}))
    with pytest.raises(Unavailable, match="one, two"):
        connect(world, url)


@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_refuses_is_one_clear_line(world: World, serve: Callable[[Answer], str], status: int) -> None:
    with pytest.raises((Unavailable, InvalidRequest, EngineFailure), match=str(status)):
        connect(world, serve(lambda path, body: (status, {})))


def test_nobody_there_is_one_clear_line_without_the_key(world: World) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9") as caught:
        connect(world, "http://user:secret@127.0.0.1:9/v1")
    assert "secret" not in caught.value.message


def test_a_server_that_fails_later_fails_that_request(world: World, serve: Callable[[Answer], str]) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body.get("stream"):
            return 500, {"error": "/secret/path"}
        return 200, {"choices": [{"token_ids": [5], "prompt_token_ids": [0, 0], "logprobs": LOGPROBS}], **MODELS}

    sampler = connect(world, serve(answer))
    try:
        error = run(sampler, x=sample(PROMPT)).ended["x"]
    finally:
        sampler.close()
    assert isinstance(error, EngineFailure)
    assert "secret" not in error.message
