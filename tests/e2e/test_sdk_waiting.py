"""Through the unmodified SDK: a client that submits far more samples than may wait gets all of them in the end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.e2e.conftest import MODEL
from tests.support.processes import freeze
from tests.support.server import RunningServer, serve

MOST = 64
SAMPLES = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[RunningServer]:
    """A server that lets few samples wait, and logs every request."""
    data_dir = tmp_path_factory.mktemp("waiting") / "data"
    arguments = ["--base-model", f"{MODEL}={tiny_folder}", "--threads", "1", "--shutdown-grace", "2"]
    limits = ["--max-waiting-samples", str(MOST), "--max-sample-rows", "8", "--log-level", "debug"]
    with serve(data_dir, [*arguments, *limits]) as running:
        yield running


def resident_kib(server: RunningServer) -> int:
    """Memory of the server's own process, without its worker."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1])


def answers(server: RunningServer) -> list[str]:
    """The statuses of all samples that were submitted, from the log."""
    return re.findall(r"POST /api/v1/asample (\d+) ", server.log.read_text())


@pytest.mark.slow
def test_a_client_that_submits_too_much_is_slowed_down_and_gets_everything(server: RunningServer, service: Any) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=12, stop=[], temperature=1.0)

    def prompt(number: int) -> types.ModelInput:
        return types.ModelInput.from_ints([number % 200 + 3, number // 200 + 3, *range(3, 203)])

    for number in range(40):  # so that what is loaded lazily is there
        sampler.sample(prompt(number), 1, params).result(timeout=60)
    before = resident_kib(server)
    worker = server.worker()
    freeze(worker)  # however fast it is, the client is to be faster
    try:
        futures = [sampler.sample(prompt(number), 1, params) for number in range(SAMPLES)]
        deadline = time.monotonic() + 120
        while answers(server).count("429") <= MOST:
            assert time.monotonic() < deadline, "the client was not asked to wait"
            time.sleep(0.05)
    finally:
        os.kill(worker, signal.SIGCONT)
    results = [future.result(timeout=180) for future in futures]
    after = resident_kib(server)
    assert len({result.sequences[0].sequence_id for result in results}) == SAMPLES
    assert all(len(result.sequences[0].tokens) == 12 for result in results)
    answered = answers(server)
    assert answered.count("200") == SAMPLES + 40, "none was lost, and none was run twice"
    assert set(answered) == {"200", "429"}
    assert after - before < 40 * 1024, f"{before} KiB before, {after} KiB after"
