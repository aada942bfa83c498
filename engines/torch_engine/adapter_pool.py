"""The adapters of one engine: as many in memory as the budget allows, the others in files until somebody asks for them.

An adapter is never lost to want of room: one that cannot be written stays in memory, and the newcomer is refused.
Used by one thread at a time. Not responsible for checkpoints.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.torch_engine.adapter import AdapterState
from engines.torch_engine.idle_file import DamagedFile, read_state, write_state
from schemas.errors import (
    ADAPTERS_BUSY,
    AlreadyExists,
    EngineFailure,
    ModelLost,
    NotFound,
    OutOfMemory,
    TinsmithError,
    is_adapters_busy,
)

log = logging.getLogger(__name__)

_PREFIX = "idle-"


@dataclass(frozen=True, slots=True)
class _Idle:
    """An adapter in a file; `size` is what it takes in memory."""

    path: Path
    size: int
    device: torch.device


class AdapterPool:
    """Training states by id, least recently used first out of memory.

    Args:
        budget_bytes: for all states in memory, each counted as `AdapterState.size_bytes`; None = no limit.
        folder: where idle ones go, of this pool alone: what an earlier process left there is deleted. None = nowhere;
            an adapter beyond the budget is then refused.
    """

    def __init__(self, budget_bytes: int | None, folder: Path | None) -> None:
        self._budget = budget_bytes
        self._folder = folder
        self._resident: OrderedDict[str, AdapterState] = OrderedDict()
        self._idle: dict[str, _Idle] = {}
        self._pins: Counter[str] = Counter()
        if folder is not None and folder.is_dir():
            for path in folder.glob(f"{_PREFIX}*"):
                _delete(path)

    def __contains__(self, adapter_id: str) -> bool:
        """Whether there is such an adapter, in memory or in a file."""
        return adapter_id in self._resident or adapter_id in self._idle

    @property
    def resident_bytes(self) -> int:
        """What the adapters in memory take."""
        return sum(state.size_bytes for state in self._resident.values())

    def get(self, adapter_id: str) -> AdapterState:
        """The adapter, brought back into memory if it was idle; it may leave again with the next call unless pinned.

        Raises `NotFound`, `OutOfMemory` if no room can be made (the adapter stays where it is), `ModelLost` if its
        file is damaged or a step of it broke off.
        """
        state = self._resident.get(adapter_id)
        if state is None:
            state = self._bring_back(adapter_id)
        state.check_usable()
        self._resident.move_to_end(adapter_id)
        return state

    def add(self, adapter_id: str, state: AdapterState) -> None:
        """A new adapter. Raises `AlreadyExists`, or `OutOfMemory` as `make_room`."""
        if adapter_id in self:
            raise AlreadyExists("an adapter of that id exists")
        self.make_room(state.size_bytes)
        self._resident[adapter_id] = state

    def replace(self, adapter_id: str, state: AdapterState) -> None:
        """Put another state in the place of an adapter. Raises `NotFound`, `EngineFailure` if it is pinned, or
        `OutOfMemory` as `make_room`; the former state then stays."""
        if adapter_id not in self:
            raise NotFound("there is no such adapter")
        if self._pins[adapter_id]:
            raise EngineFailure("the adapter is in use; it cannot be replaced now")
        former = self._resident.get(adapter_id)
        self.check_size(state.size_bytes)
        self.make_room(state.size_bytes - (0 if former is None else former.size_bytes))
        self.remove(adapter_id)
        self._resident[adapter_id] = state

    def remove(self, adapter_id: str) -> None:
        """Forget an adapter, its pins and its file; unknown ids are ignored."""
        self._resident.pop(adapter_id, None)
        self._pins.pop(adapter_id, None)
        idle = self._idle.pop(adapter_id, None)
        if idle is not None:
            _delete(idle.path)

    # -- who may leave -----------------------------------------------------------------------------------------------
    def pin(self, adapter_id: str) -> AdapterState:
        """Keep the adapter in memory until as many `unpin` follow. Raises as `get`."""
        state = self.get(adapter_id)
        self._pins[adapter_id] += 1
        return state

    def unpin(self, adapter_id: str) -> None:
        """Take one pin away; fine for an adapter that was removed meanwhile."""
        if self._pins[adapter_id] > 1:
            self._pins[adapter_id] -= 1
        else:
            del self._pins[adapter_id]

    def in_turns(self, adapter_ids: Sequence[str]) -> Iterator[dict[str, AdapterState | TinsmithError]]:
        """All of these (each once), as many at a time as fit, pinned while the caller has them; or errors of `get`."""
        rest = list(adapter_ids)
        while rest:
            taken: dict[str, AdapterState | TinsmithError] = {}
            pinned: list[str] = []
            try:
                for adapter_id in rest:
                    try:
                        taken[adapter_id] = self.pin(adapter_id)
                        pinned.append(adapter_id)
                    except TinsmithError as error:
                        if is_adapters_busy(error) and pinned:
                            break
                        taken[adapter_id] = error
                rest = rest[len(taken) :]
                yield taken
            finally:
                for adapter_id in pinned:
                    self.unpin(adapter_id)

    # -- room --------------------------------------------------------------------------------------------------------
    def check_size(self, needed: int) -> None:
        """Raise `OutOfMemory` if an adapter of so many bytes (`adapter.state_bytes`) can never be in memory."""
        if self._budget is not None and needed > self._budget:
            raise OutOfMemory(
                f"the adapter needs {_mib(needed)} with optimizer and gradient; all adapters together may take "
                f"{_mib(self._budget)}",
                hint="use a lower rank or train fewer layers, or ask the operator for more memory for adapters",
                code="adapter_too_large",
            )

    def make_room(self, needed: int) -> None:
        """Let unpinned adapters leave memory until `needed` bytes fit; call it before they are allocated.

        Raises `OutOfMemory` if they never fit, while too many others are in use (`ADAPTERS_BUSY`; nobody has
        left), or if a file cannot be written (that adapter has stayed).
        """
        if self._budget is None:
            return
        self.check_size(needed)
        resident = self.resident_bytes
        leaving: list[str] = []
        for adapter_id, state in self._resident.items():
            if resident + needed <= self._budget:
                break
            if self._may_leave(adapter_id, state):
                leaving.append(adapter_id)
                resident -= state.size_bytes
        if resident + needed > self._budget:
            raise OutOfMemory(
                f"no room for an adapter of {_mib(needed)}: of the {_mib(self._budget)} for adapters, "
                f"{_mib(self.resident_bytes)} are taken, {_mib(resident)} of it by adapters that cannot leave now",
                hint="try again when they have ended, or ask the operator for more memory for adapters",
                code=ADAPTERS_BUSY,
            )
        for adapter_id in leaving:
            self._put_aside(adapter_id, needed)

    def _may_leave(self, adapter_id: str, state: AdapterState) -> bool:
        in_use = self._pins[adapter_id] > 0 or state.stage is not None
        return self._folder is not None and not in_use and state.out_of_use is None

    def _put_aside(self, adapter_id: str, needed: int) -> None:
        """Write an adapter into a file, then free its memory."""
        assert self._folder is not None
        state = self._resident[adapter_id]
        path = self._folder / f"{_PREFIX}{uuid.uuid4().hex}.safetensors"
        temporary = path.with_suffix(".tmp")
        idle = _Idle(path, state.size_bytes, state.flat.device)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_state(temporary, state)
            os.replace(temporary, path)
        except OSError as error:
            _delete(temporary)
            log.exception("an idle adapter of %s could not be written; it stays in memory", _mib(idle.size))
            raise OutOfMemory(
                f"no room for an adapter of {_mib(needed)}: of the {_mib(self._budget or 0)} for adapters, "
                f"{_mib(self.resident_bytes)} are taken, and idle ones cannot be put aside: "
                f"{error.strerror or 'input/output error'}",
                hint="ask the operator to look at the disk for idle adapters",
                code="idle_disk",
            ) from None
        except BaseException:
            _delete(temporary)
            raise
        self._idle[adapter_id] = idle
        del self._resident[adapter_id]
        state.retire("this state left memory; the adapter has to be asked for again")

    def _bring_back(self, adapter_id: str) -> AdapterState:
        idle = self._idle.get(adapter_id)
        if idle is None:
            raise NotFound("there is no such adapter")
        self.make_room(idle.size)
        try:
            state = read_state(idle.path, idle.device)
        except (DamagedFile, OSError) as error:
            log.exception("the file of an idle adapter could not be read back")
            raise ModelLost(
                "the state of this model could not be read back from the disk for idle adapters",
                hint="resume from a checkpoint",
            ) from error
        self._resident[adapter_id] = state
        del self._idle[adapter_id]
        _delete(idle.path)
        return state


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        log.warning("a file of an idle adapter could not be deleted", exc_info=True)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
