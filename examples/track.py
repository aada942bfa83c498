"""Train for a few steps and send the metrics of the run to TensorBoard, MLflow or Weights & Biases.

    export TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=$(cat DATA_DIR/dev_key)
    python examples/track.py --to tensorboard --folder runs

The server reports metrics with every result; where they go is the client's choice. Only the library that is chosen is
imported. Everything stays on this machine: MLflow writes a database into the folder, Weights & Biases is offline unless
`WANDB_MODE` says otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from common import answer_ids, ask, connect, options, shifted
from tinker import types


class Tracker(Protocol):
    """Where the numbers of one run go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step."""

    def close(self) -> None:
        """Everything is written."""


class TensorBoard:
    """Event files, by `tensorboardX`; look at them with `tensorboard --logdir FOLDER`."""

    def __init__(self, run: str, settings: Mapping[str, Any], folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / run), flush_secs=5)
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A SQLite database in the folder, or the server that `MLFLOW_TRACKING_URI` names."""

    def __init__(self, run: str, settings: Mapping[str, Any], folder: Path) -> None:
        from mlflow import MlflowClient

        folder.mkdir(parents=True, exist_ok=True)
        local = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
        found = self._client.get_experiment_by_name("tinsmith")
        experiment = found.experiment_id if found else self._client.create_experiment("tinsmith")
        self._run = self._client.create_run(experiment, run_name=run).info.run_id
        for name, value in settings.items():
            self._client.log_param(self._run, name, value)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # Its names have no colons beside other signs.
            self._client.log_metric(self._run, re.sub(r"[^\w./ -]", ".", name), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WeightsAndBiases:
    """Offline files below the folder, which `wandb sync` sends later; `WANDB_MODE=online` sends them at once."""

    def __init__(self, run: str, settings: Mapping[str, Any], folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(project="tinsmith", name=run, config=dict(settings), dir=str(folder), mode=mode)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def main() -> None:
    chosen = options(
        "Send a run's metrics to a tracker.", to="tensorboard", folder="runs", steps=5, learning_rate=1e-3, rank=8
    )
    if chosen.to not in TRACKERS:
        raise SystemExit(f"--to {chosen.to} is not known; choose one of {', '.join(TRACKERS)}")
    service = connect(chosen)
    client = service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1).result()
    tokenizer = client.get_tokenizer()
    answer = answer_ids(tokenizer, "A soft white metal.")
    data = [shifted(ask(tokenizer, "What is tin?"), answer, weights=[1] * len(answer))]

    info = client.get_info()
    # The id of the run joins the tracker's page with the server's log, usage and traces.
    run = info.model_id.replace(":", "-")
    settings = {"model": chosen.model, "rank": chosen.rank, "learning_rate": chosen.learning_rate, "run": info.model_id}
    tracker: Tracker = TRACKERS[chosen.to](run, settings, Path(chosen.folder))
    for step in range(chosen.steps):
        gradient = client.forward_backward(data, loss_fn="cross_entropy")
        update = client.optim_step(types.AdamParams(learning_rate=chosen.learning_rate))
        metrics = {**gradient.result().metrics, **update.result().metrics}
        metrics["loss_per_token"] = metrics["loss:sum"] / len(answer)
        tracker.log(step, metrics)
        print(f"step {step}:", " ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    tracker.close()
    service.close("success").result()
    print(f"sent to {chosen.to}: {run}")


if __name__ == "__main__":
    main()
