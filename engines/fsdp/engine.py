"""The FSDP engine: the torch engine on a base model that is sharded over several processes (torch's FSDP2).

Every rank gets every call with the same arguments. The frozen base is sharded; adapters are whole on every rank, which
computes its own part of the datums and takes every step. Not responsible for starting ranks or for ending them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from engines.capabilities import Capabilities
from engines.fsdp.capabilities import CAPABILITIES
from engines.fsdp.group import Ranks
from engines.fsdp.loading import gathered_bytes, load_sharded, local_bytes, whole
from engines.fsdp.shares import share
from engines.fsdp.turns import SharedTurns
from engines.lora import Router
from engines.torch_engine.assembly import Assembly, assemble
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.loading import resolve_device
from engines.torch_engine.memory import estimate_memory
from engines.torch_engine.open_operations import OpenOperations
from engines.torch_engine.operations import OpenOperation
from engines.torch_engine.training_pass import TrainingPass
from schemas.base_model_info import BaseModelInfo, MemoryEstimate
from schemas.errors import EngineFailure, InvalidRequest, TinsmithError, Unavailable
from schemas.operations import (
    AdapterStep,
    LoraSpec,
    OptimizerType,
    PassStats,
    SavedAdapter,
    SavedSnapshot,
    StepParams,
    StepResult,
    TrainBatch,
)

_SLACK = 1.5
"""A rank's part of a turn may be so much larger than an equal part before it takes a second pass."""


class FsdpEngine(TorchEngine):
    """As `TorchEngine`, one rank of several; see `engines.ranks.Place`.

    On the CPU in float32 an operation's numbers do not depend on company, as with one process; they do depend, in their
    last bits, on the number of ranks.
    """

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    def __init__(self, model_folder: Path, **options: Any) -> None:
        if options.get("model") is not None:
            raise InvalidRequest(
                f"engine {self.capabilities.engine!r} reads the base model from its folder", field="model"
            )
        super().__init__(model_folder, **options)
        self._ranks = Ranks(0, 1)
        self.read_bytes = 0
        """Of the base model's files, by this rank."""

    @classmethod
    def check(cls) -> None:
        """As `TorchEngine.check`, and torch was built with what processes talk through."""
        super().check()
        if not (dist.is_available() and dist.is_gloo_available()):
            raise Unavailable(
                f"engine {cls.capabilities.engine!r} needs a build of torch with torch.distributed and gloo"
            )

    def load(self) -> BaseModelInfo:
        """Meet the other ranks, then as `TorchEngine.load`. Raises `Unavailable` if a rank has no device."""
        device = self._own_device()
        self._ranks = Ranks.join(self._place, device)
        self._device = str(device)
        return super().load()

    @property
    def lockstep(self) -> Ranks | None:
        """The other ranks, if there are any."""
        return self._ranks if self._ranks.size > 1 else None

    # -- loading -----------------------------------------------------------------------------------------------------
    def _own_device(self) -> torch.device:
        device = resolve_device(self._device)
        if device.type == "cpu":
            return device
        count = torch.cuda.device_count()
        if self._place.local_rank >= count:
            raise Unavailable(
                f"engine {self.capabilities.engine!r} needs a CUDA device for each of its {self._place.ranks} ranks; "
                f"there are {count} here",
                hint="start fewer ranks, or use device cpu",
            )
        if not dist.is_nccl_available():
            raise Unavailable(f"engine {self.capabilities.engine!r} on CUDA devices needs a build of torch with NCCL")
        device = torch.device("cuda", self._place.local_rank)
        torch.cuda.set_device(device)
        return device

    def _agreed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of all ranks: machines may differ in what `auto` means on them."""
        return torch.float32 if self._ranks.any(dtype == torch.float32) else dtype

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        dtype = self._agreed(dtype)
        sharded = load_sharded(self._folder, dtype, device, self._ranks)
        self.read_bytes = sharded.read_bytes
        return sharded.model

    def _assemble(self) -> Assembly:
        assembly = assemble(self._model, batch_invariant=self._batch_invariant, whole=whole)
        run, info = assembly.run, assembly.info
        packed, exact = (bool(each) for each in self._ranks.least([run.packs, info.batch_invariant]))
        run.packs = packed
        info = replace(
            info,
            packed=packed,
            batch_invariant=exact,
            micro_batch_tokens=info.micro_batch_tokens * self._ranks.replicas,
            peak_flops=self._ranks.total([info.peak_flops])[0],
        )
        return replace(assembly, info=info)

    def _measure_memory(self, router: Router) -> MemoryEstimate:
        """What every rank has, at least: decisions that follow from it are the same everywhere."""
        memory = estimate_memory(self._model, router)
        on_cpu = resolve_device(self._device).type == "cpu"
        own = memory.free // (self._place.local_ranks if on_cpu else 1) - self._gathered_bytes()
        total, free, per_token, pairs, checkpointed = self._ranks.least(
            [memory.total, max(0, own), -memory.per_token, -memory.per_token_pair, -memory.per_token_checkpointed]
        )
        return replace(
            memory,
            base=local_bytes(self._model),
            total=int(total),
            free=int(free),
            per_token=int(-per_token),
            per_token_pair=int(-pairs),
            per_token_checkpointed=int(-checkpointed),
        )

    def _gathered_bytes(self) -> int:
        """Of whole weights that a pass holds beside what this rank keeps."""
        return gathered_bytes(self._model)

    def _make_turns(self, run: TrainingPass) -> OpenOperations:
        info, size = self.info, self._ranks.replicas
        tokens = info.micro_batch_tokens if size == 1 else int(-(-info.micro_batch_tokens // size) * _SLACK)
        return SharedTurns(run, tokens, self._checkpointing, info.memory, self._room, ranks=self._ranks)

    # -- adapters: on every rank or on none --------------------------------------------------------------------------
    def create_adapter(self, adapter_id: str, lora: LoraSpec, optimizer: OptimizerType = "adamw") -> int:
        """See `TorchEngine.create_adapter`."""
        return self._ranks.together(
            partial(super().create_adapter, adapter_id, lora, optimizer), undo=lambda: self._pool.remove(adapter_id)
        )

    def save_adapter(self, adapter_id: str, folder: Path, *, with_optimizer: bool) -> SavedAdapter:
        """See `TorchEngine.save_adapter`. Rank 0 writes; its answer counts."""
        if self._ranks.rank == 0:
            return super().save_adapter(adapter_id, folder, with_optimizer=with_optimizer)
        return SavedAdapter(0, self._pool.get(adapter_id).spec)

    def load_adapter(
        self,
        adapter_id: str,
        folder: Path,
        *,
        with_optimizer: bool,
        create: bool,
        optimizer: OptimizerType | None = None,
    ) -> SavedAdapter:
        """See `TorchEngine.load_adapter`. The folder must be there on every rank's machine."""
        return self._ranks.together(
            partial(
                super().load_adapter,
                adapter_id,
                folder,
                with_optimizer=with_optimizer,
                create=create,
                optimizer=optimizer,
            ),
            undo=(lambda: self._pool.remove(adapter_id)) if create else None,
        )

    def snapshot_adapter(self, adapter_id: str, path: Path) -> Callable[[], SavedSnapshot]:
        """See `TorchEngine.snapshot_adapter`. Rank 0 writes; its answer counts."""
        if self._ranks.rank == 0:
            return super().snapshot_adapter(adapter_id, path)
        self._pool.get(adapter_id)
        return lambda: SavedSnapshot(0, "")

    def restore_adapter(self, adapter_id: str, path: Path, sha256: str) -> None:
        """See `TorchEngine.restore_adapter`."""
        self._ranks.together(
            partial(super().restore_adapter, adapter_id, path, sha256), undo=lambda: self._pool.remove(adapter_id)
        )

    # -- training ----------------------------------------------------------------------------------------------------
    def _open_stage(self, adapter_id: str) -> None:
        self._ranks.together(
            partial(super()._open_stage, adapter_id), undo=partial(super()._close_stage, adapter_id, keep=False)
        )

    def _begin(self, batch: TrainBatch) -> OpenOperation:
        operation = self._ranks.together(partial(super()._begin, batch), undo=lambda: None)
        operation.share = share(
            [len(datum.tokens) for datum in batch.datums],
            self._ranks.replicas,
            window=self.info.micro_batch_tokens,
            first=zlib.crc32(b"".join(datum.tokens.tobytes() for datum in batch.datums[:1])) % self._ranks.replicas,
        )
        return operation

    def optimizer_step(
        self, adapter_id: str, params: StepParams | None = None, *, grad_clip_norm: float = 0.0
    ) -> StepResult:
        """See `TorchEngine.optimizer_step`."""
        return self._ranks.together(partial(super().optimizer_step, adapter_id, params, grad_clip_norm=grad_clip_norm))

    def optimizer_zero_grad(self, adapter_id: str) -> None:
        """See `TorchEngine.optimizer_zero_grad`."""
        self._ranks.together(partial(super().optimizer_zero_grad, adapter_id))

    def optimizer_steps(self, steps: Sequence[AdapterStep]) -> Sequence[StepResult | TinsmithError]:
        """See `TorchEngine.optimizer_steps`. Ranks of which only some could take a step end."""
        outcomes = super().optimizer_steps(steps)
        failed = [float(isinstance(outcome, TinsmithError)) for outcome in outcomes]
        if self._ranks.least(failed) != [-number for number in self._ranks.least([-number for number in failed])]:
            self._ranks.broken(EngineFailure("an optimizer step failed on some ranks only"))
        return outcomes

    def take_stats(self) -> PassStats:
        """Of all ranks; the seconds are this one's."""
        stats = super().take_stats()
        counted: list[float] = [stats.tokens, stats.rows, stats.sequences, stats.passes]
        counted = [*(counted if self._ranks.leads else [0] * len(counted)), stats.flops]
        *counts, flops = self._ranks.total(counted)
        tokens, rows, sequences, passes = (int(count) for count in counts)
        return replace(stats, tokens=tokens, rows=rows, sequences=sequences, passes=passes, flops=flops)
