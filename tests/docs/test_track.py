"""examples/track.py writes what the server reported: read back from the files of TensorBoard, MLflow and W&B.

Runs in the environment of the site and the notebooks (`make site`), which has these libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.server import RunningServer, environment

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".site" / "bin" / "python"
STEPS = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # these libraries take long to begin on a busy machine
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with the trackers (make site)"),
]

READERS = {
    "tensorboard": """
from tensorboardX.proto.event_pb2 import Event
for file in folder.rglob("events.out.tfevents*"):
    data = file.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        found += [[event.step, value.tag, value.simple_value] for value in event.summary.value]
""",
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
experiment = client.get_experiment_by_name("tinsmith")
for run in client.search_runs([experiment.experiment_id]):
    assert run.info.status == "FINISHED" and run.data.params["model"] == "acme/tiny"
    for name in run.data.metrics:
        found += [[each.step, name, each.value] for each in client.get_metric_history(run.info.run_id, name)]
""",
    # A log of records in blocks of 32 KiB, as LevelDB writes it, after a header of 7 bytes.
    "wandb": """
from wandb.proto.wandb_internal_pb2 import Record
for file in folder.rglob("run-*.wandb"):
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            message, record = Record.FromString(record), b""
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in message.history.item}
            found += [[items["_step"], name, value] for name, value in items.items() if name[0] != "_"]
""",
}


@pytest.mark.parametrize("to", READERS)
def test_the_numbers_of_a_run_arrive(to: str, tiny_server: RunningServer, tmp_path: Path) -> None:
    where = {"TINKER_BASE_URL": tiny_server.url, "TINKER_API_KEY": tiny_server.key, "TINKER_MODEL": "acme/tiny"}
    clean = {name: value for name, value in environment(where).items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    folder = tmp_path / "runs"
    command = [PYTHON, "examples/track.py", "--to", to, "--folder", folder, "--steps", str(STEPS)]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^step \d+: (.*)$", done.stdout, flags=re.MULTILINE)
    printed = [dict(re.findall(r"(\S+) (\S+)", line)) for line in lines]
    assert len(printed) == STEPS

    head = f"import json, pathlib\nfolder, found = pathlib.Path({str(folder)!r}), []\n"
    program = head + READERS[to] + "\nprint(json.dumps(found))"
    read = subprocess.run([PYTHON, "-c", program], env={**os.environ}, capture_output=True, text=True, timeout=240)
    assert read.returncode == 0, read.stderr
    # Each library has its own idea of which signs a name may have.
    found = {(step, re.sub(r"\W", "_", name)): value for step, name, value in json.loads(read.stdout.splitlines()[-1])}
    for step, metrics in enumerate(printed):
        assert {"loss:sum", "grad_norm", "loss_per_token"} <= metrics.keys()
        for name, value in metrics.items():
            assert found[step, re.sub(r"\W", "_", name)] == pytest.approx(float(value), rel=1e-3), (step, name)


def test_an_unknown_tracker_is_refused_by_name(tiny_server: RunningServer) -> None:
    command = [PYTHON, "examples/track.py", "--to", "paper"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.strip() == "--to paper is not known; choose one of tensorboard, mlflow, wandb"
