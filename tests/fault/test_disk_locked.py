"""Another process holds the database's write lock for five seconds: everybody waits, nobody loses anything."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from tests.support.api import DATA, serving
from tests.support.disk_program import calm_settings
from tests.support.tiny_model import make_tiny_model

SECONDS = 5.0
HOLD = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
until = time.monotonic() + float(sys.argv[2])
print("held", flush=True)
sys.stdin.readline()
time.sleep(max(0.0, until - time.monotonic()))
connection.execute("COMMIT")
"""


async def test_requests_wait_for_the_lock_and_reads_do_not(tmp_path: Path) -> None:
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    async with serving(settings) as api:
        session = await api.session()
        model = await api.model(session)
        await api.do("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
        expected = await api.scores(model)
        database = str(settings.data_dir / "tinsmith.db")
        began = time.monotonic()
        command = (sys.executable, "-c", HOLD, database, str(SECONDS))
        holder = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"held\n"
        body = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.0}}
        twice = [asyncio.create_task(api.post("optim_step", **body)) for _ in range(2)]
        await asyncio.sleep(0.5)
        for _ in range(10):  # the event loop and the readers go on meanwhile: the lock is held until they are done
            assert (await api.client.get(f"training_runs/{model}")).status_code == 200
            assert (await api.post("session_heartbeat", session_id=session)).status_code == 200
        assert not any(task.done() for task in twice)
        holder.stdin.write(b"\n")
        answers = [await task for task in twice]
        assert time.monotonic() - began > SECONDS
        assert await holder.wait() == 0
        assert [answer.status_code for answer in answers] == [200, 200]
        [request_id] = {answer.json()["request_id"] for answer in answers}
        assert "error" not in await api.result(request_id)
        assert await api.scores(model) == expected
        assert [call for group in api.groups.made for call in group.calls].count("optimizer_step") == 1
