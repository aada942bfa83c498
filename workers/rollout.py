"""A worker that only samples, on weights of its own: the sampling half of the split layout.

Its builder runs inside the worker process only: it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.machine import usable_cores
from engines.sampling.base import SamplingEngine
from schemas.base_model_info import BaseModelInfo
from schemas.fail_points import fail_point
from schemas.operations import SampleTurn, SampleTurnResult
from workers.dispatch import Dispatch, register
from workers.spec import WorkerSpec


class RolloutWorker:
    """Runs a sampling engine turn by turn."""

    def __init__(self, rollout: SamplingEngine, info: BaseModelInfo) -> None:
        self.rollout = rollout
        self.info = info

    @register(Dispatch.ONE_TO_ALL)
    def sample_turn(self, turn: SampleTurn) -> SampleTurnResult:
        """One turn of the sampling engine; requests that are not done go on with the next one."""
        fail_point("sample.turn")
        return self.rollout.turn(turn)


def build_rollout(spec: WorkerSpec, progress: Callable[[str], None]) -> RolloutWorker:
    """Prepare the base model's files and load a copy of it that nobody trains.

    A sampler of another program has its own copy: then the model is loaded on the CPU to learn its facts, and let go.
    Raises what `prepare` and `load` raise: a `TinsmithError` that says what is wrong with the model.
    """
    from engines.base_models import prepare

    progress("preparing the files of the base model (the built-in one is converted once, in about half a minute)")
    folder = prepare(spec.model, spec.source, Path(spec.data_dir))

    from transformers import AutoTokenizer

    from engines.torch_engine.engine import TorchEngine
    from workers.samplers import build_sampler, check_sampler

    check_sampler(spec)
    progress("loading the weights of the base model")
    engine = TorchEngine(
        folder,
        dtype=spec.dtype,
        device=spec.device if spec.sampler == "torch" else "cpu",
        threads=spec.threads or max(1, usable_cores() // spec.ranks),
        name=spec.model,
        batch_invariant=spec.batch_invariant,
    )
    info = engine.load()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if spec.sampler != "torch":
        progress("starting the sampler")
    return RolloutWorker(build_sampler(spec, engine, folder, info, tokenizer, None), info)
