"""How long a heartbeat takes while 200 request bodies of 3 MB arrive, on the default model with its worker busy.

The bodies are sent by one process and the heartbeats by another, so that the sender's own work is not counted as the
server's. Reported: median, p95 and worst latency of `session_heartbeat` while the burst lasts, and before it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from typing import Any

import httpx
import numpy as np

from schemas.proto import tinker_public_pb2 as pb

BODIES = 200
DATUMS, TOKENS = 190, 1000
"""190 datums of 1,000 tokens: int32 tokens, int64 targets and float32 weights make 3.04 MB."""

CONCURRENT = 16


@dataclass(frozen=True)
class Latency:
    """Milliseconds over `count` heartbeats."""

    count: int
    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, seconds: list[float]) -> Latency:
        ordered = sorted(1000 * value for value in seconds)
        return cls(len(ordered), statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))], ordered[-1])


def heartbeats(url: str, key: str, session_id: str, stop: Event, found: Any) -> None:
    """Send a heartbeat every 20 ms until told to stop; put the latencies (s) into `found`."""
    taken = []
    with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60) as client:
        while not stop.is_set():
            begin = time.perf_counter()
            client.post("session_heartbeat", json={"session_id": session_id}).raise_for_status()
            taken.append(time.perf_counter() - begin)
            time.sleep(0.02)
    found.put(taken)


def examples() -> bytes:
    """About 3 MB of training examples. Encoded messages that are joined merge, so each body is its number and these."""
    rng = np.random.default_rng(0)
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(DATUMS):
        tokens = rng.integers(0, 49_000, TOKENS + 1)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        for name, values, kind in (
            ("target_tokens", tokens[1:].astype("<i8"), pb.DTYPE_INT64),
            ("weights", np.ones(TOKENS, "<f4"), pb.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), kind
            tensor.shape.append(TOKENS)
    data: bytes = message.SerializeToString()
    return data


async def burst(url: str, key: str, model_id: str) -> float:
    """Send all bodies, some at a time; returns the seconds it took."""
    gate = asyncio.Semaphore(CONCURRENT)
    data = examples()
    headers = {"X-API-Key": key, "Content-Type": "application/x-protobuf"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as client:

        async def send(seq_id: int) -> None:
            async with gate:
                number = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id).SerializeToString()
                (await client.post("forward_backward", content=number + data)).raise_for_status()

        begin = time.perf_counter()
        await asyncio.gather(*(send(seq_id) for seq_id in range(1, BODIES + 1)))
        return time.perf_counter() - begin


def measured(url: str, key: str, session_id: str, work: Any) -> tuple[Latency, Any]:
    """Latency of heartbeats while `work()` runs, and what it returned."""
    context = multiprocessing.get_context("spawn")
    stop, found = context.Event(), context.Queue()
    process = context.Process(target=heartbeats, args=(url, key, session_id, stop, found))
    process.start()
    time.sleep(1.5)  # the other process imports its packages
    outcome = work()
    stop.set()
    latencies = found.get(timeout=120)
    process.join()
    return Latency.of(latencies), outcome


def run(url: str, key: str, model: str) -> dict[str, Any]:
    """Measure a running server at `url` (with `/api/v1`)."""
    with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60) as client:
        session_id = client.post("create_session", json={"sdk_version": "bench"}).json()["session_id"]
        request = {"session_id": session_id, "model_seq_id": 0, "base_model": model, "lora_config": {"rank": 8}}
        promise = client.post("create_model", json=request).raise_for_status().json()
        while client.post("retrieve_future", json={"request_id": promise["request_id"]}).status_code == 408:
            continue
        idle, _ = measured(url, key, session_id, lambda: time.sleep(2))
        busy, seconds = measured(url, key, session_id, lambda: asyncio.run(burst(url, key, promise["model_id"])))
        client.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}, "detail": None})
    return {"bodies": BODIES, "burst_seconds": seconds, "idle_ms": asdict(idle), "busy_ms": asdict(busy)}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    rows = [f"{'heartbeat (ms)':<28}{'count':>8}{'median':>9}{'p95':>9}{'worst':>9}"]
    for label, key in (("idle", "idle_ms"), (f"{result['bodies']} bodies of 3 MB arriving", "busy_ms")):
        row = result[key]
        rows.append(f"{label:<28}{row['count']:>8}{row['median']:>9.1f}{row['p95']:>9.1f}{row['worst']:>9.1f}")
    return "\n".join([*rows, f"the burst took {result['burst_seconds']:.1f} s", json.dumps(result)])
