"""One adapter's whole training state as a durable file: what training goes on from after a process has died.

The file is that of `idle_file.py`; here it is made durable and given a checksum of all its bytes. Not responsible for
when a snapshot is taken or which one is used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from pathlib import Path

import torch

from engines.lora import AdapterWeights, views
from engines.torch_engine.adapter import AdapterState, Gradient
from engines.torch_engine.idle_file import DamagedFile, read_state, write_state
from schemas.errors import EngineFailure, ModelLost, NotNow
from schemas.fail_points import fail_point
from schemas.operations import SavedSnapshot

_log = logging.getLogger(__name__)
_PIECE = 1 << 20


def captured(state: AdapterState) -> AdapterState:
    """A copy in memory of the CPU that shares nothing with the state. Raises `EngineFailure` inside `train_mode`."""
    if state.stage is not None:
        raise EngineFailure("the adapter is in training; no snapshot can be taken now")
    flat = _copy(state.flat)
    gradient = state.gradient
    return AdapterState(
        spec=state.spec,
        flat=flat,
        weights=AdapterWeights(views(flat, state.weights.pairs), state.weights.scaling),
        optimizer_type=state.optimizer_type,
        moments={slot: _copy(vector) for slot, vector in state.moments.items()},
        steps=state.steps,
        gradient=Gradient(None if gradient.flat is None else _copy(gradient.flat), gradient.passes, gradient.poisoned),
    )


def write_snapshot(path: Path, state: AdapterState) -> SavedSnapshot:
    """Write a captured state: the file is there whole or not at all, and stays when this returns.

    Raises `EngineFailure` if the disk does not take it; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_state(temporary, state)
        fail_point("snapshot.written")
        _sync(temporary)
        saved = SavedSnapshot(temporary.stat().st_size, _sha256(temporary))
        os.rename(temporary, path)
        _sync(path.parent)
        fail_point("snapshot.renamed")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EngineFailure(f"a snapshot could not be written: {error.strerror or 'input/output error'}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return saved


def read_snapshot(path: Path, sha256: str, device: torch.device) -> AdapterState:
    """The state as it was, bit for bit.

    Raises `ModelLost` if the file is missing or not what was written, `NotNow` if it cannot be read for the moment: no
    descriptor left, a network file system that does not answer. Such a file may be whole.
    """
    try:
        if _sha256(path) != sha256:
            raise DamagedFile("the file does not match its checksum")
        return read_state(path, device)
    except (DamagedFile, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        _log.warning("a snapshot cannot be used: %s", error)
        raise ModelLost(
            "a snapshot of this model is missing or damaged on the server's disk", hint="resume from a checkpoint"
        ) from error
    except OSError as error:
        raise NotNow(f"a snapshot cannot be read now ({error.strerror or 'input/output error'})") from error


def _copy(vector: torch.Tensor) -> torch.Tensor:
    return vector.detach().to("cpu", copy=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
