"""Builds the worker of a `WorkerSpec`. Runs inside the worker process only: it imports torch."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from engines.capabilities import Capabilities
from engines.machine import usable_cores
from schemas.errors import InvalidRequest, Unavailable
from workers.spec import WorkerSpec
from workers.tinker import TinkerActorRolloutRefWorker

GIB = 1 << 30
Progress = Callable[[str], None]
"""Reports one short phrase about what is being loaded, for people who wait."""


def resolve_builder(spec: WorkerSpec) -> Callable[[WorkerSpec, Progress], object]:
    """Import the function that `spec.builder` names."""
    module, _, function = spec.builder.partition(":")
    return cast("Callable[[WorkerSpec, Progress], object]", getattr(importlib.import_module(module), function))


def idle_folder(spec: WorkerSpec, kind: str = "adapters") -> Path:
    """Where this worker alone (of several ranks: this rank) keeps adapters, or samples, that do not fit into memory."""
    folder = _idle_root(spec, kind)
    return folder if spec.place is None else folder / f"rank-{spec.place.rank}"


def _idle_root(spec: WorkerSpec, kind: str) -> Path:
    return Path(spec.scratch or spec.data_dir) / f"idle_{kind}" / spec.model.replace("/", "--").replace(":", "--")


def delete_leftovers(spec: WorkerSpec) -> None:
    """Delete what workers with another number of ranks left in the idle folders; rank 0 does it for all."""
    if spec.place is not None and spec.place.rank > 0:
        return
    kept = {f"rank-{rank}" for rank in range(spec.ranks)} if spec.place is not None else set()
    for kind in ("adapters", "samples"):
        for path in _idle_root(spec, kind).glob("*"):
            if path.is_dir() and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_file() and kept:
                path.unlink(missing_ok=True)


def _tensor_parallel(spec: WorkerSpec, capabilities: Capabilities) -> dict[str, Any]:
    """The argument of engines that have it. Raises `InvalidRequest` for the others, unless it is 1."""
    if capabilities.tensor_parallel:
        return {"tensor_parallel": spec.tensor_parallel}
    if spec.tensor_parallel != 1:
        raise InvalidRequest(
            f"tensor_parallel is {spec.tensor_parallel}; engine {spec.engine!r} accepts: 1", field="tensor_parallel"
        )
    return {}


def build_worker(spec: WorkerSpec, progress: Progress) -> TinkerActorRolloutRefWorker:
    """Prepare the base model's files, load the engine and put the sampler on the same copy of the weights.

    Raises what `get_engine`, `prepare` and `load` raise: a `TinsmithError` that says what is wrong with the model.
    """
    from engines.base_models import prepare
    from engines.registry import get_engine

    progress("starting the engine")
    engine_class = get_engine(spec.engine)

    from transformers import AutoTokenizer

    from engines.torch_engine.engine import TorchEngine
    from workers.samplers import build_sampler, check_sampler

    if not issubclass(engine_class, TorchEngine):
        raise Unavailable(
            f"engine {spec.engine!r} has no sampler on the same copy of the weights; use engine 'torch' or 'fsdp'"
        )
    check_sampler(spec)
    delete_leftovers(spec)
    progress("preparing the files of the base model (the built-in one is converted once, in about half a minute)")
    folder = prepare(spec.model, spec.source, Path(spec.data_dir))
    progress("loading the weights of the base model")
    engine = engine_class(
        folder,
        dtype=spec.dtype,
        device=spec.device,
        threads=spec.threads or max(1, usable_cores() // spec.ranks),
        name=spec.model,
        batch_invariant=spec.batch_invariant,
        micro_batch_tokens=spec.micro_batch_tokens,
        gradient_checkpointing=spec.gradient_checkpointing,
        adapter_memory=None if spec.adapter_memory_gib is None else int(spec.adapter_memory_gib * GIB),
        idle_folder=idle_folder(spec),
        place=spec.place,
        **_tensor_parallel(spec, engine_class.capabilities),
    )
    info = engine.load()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if spec.sampler != "torch":
        progress("starting the sampler")
    rollout = build_sampler(spec, engine, folder, info, tokenizer, idle_folder(spec, "samples"))
    return TinkerActorRolloutRefWorker(engine, rollout, info)
