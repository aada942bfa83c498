"""Which interpreter the ranks of a base model run in, and what has to be right before the first of them starts.

Runs where the ranks will: in the server, or on a node of a cluster. Blocks. Imports nothing heavy.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from engines.base_models import DEFAULT_MODEL, built_in_folder
from engines.environments import check_in, engine_interpreter, with_project
from schemas.errors import Unavailable
from workers.spec import WorkerSpec

_log = logging.getLogger("tinsmith.workers")

_CONVERT_SECONDS = 900.0


def ready_interpreter(spec: WorkerSpec, *, ray: str | None = None) -> str:
    """The interpreter for the ranks of `spec`: this process's own, or that of its engine, which has been asked.

    `ray`: the version of Ray that it must have, for ranks that are actors. Raises `Unavailable` (what is missing there,
    and how to install it) and `InvalidRequest` (an unknown engine).
    """
    python = engine_interpreter(spec.engine, spec.engine_python)
    if python is None:
        return sys.executable
    found = check_in(python, spec.engine)
    if ray is not None and found.get("ray") != ray:
        has = f"ray {found['ray']}" if "ray" in found else "no ray"
        raise Unavailable(
            f"the environment of engine {spec.engine!r} has {has}; the cluster's is {ray}",
            hint=f"install ray=={ray} there, on every node",
        )
    _log.info("engine %s runs in %s (%s)", spec.engine, python, ", ".join(f"{k} {v}" for k, v in found.items()))
    _convert_built_in(spec)
    return str(python)


def _convert_built_in(spec: WorkerSpec) -> None:
    """The built-in model is made from a package of the server's own environment."""
    if spec.source is not None or spec.model != DEFAULT_MODEL or built_in_folder(Path(spec.data_dir)).is_dir():
        return
    command = [sys.executable, "-m", "engines.base_models", spec.model, "--data-dir", spec.data_dir]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_CONVERT_SECONDS, env=with_project(os.environ), check=False
    )
    if done.returncode != 0:
        _log.error("the built-in base model cannot be made: %s", done.stderr)
        message, _, hint = done.stderr.strip().partition("\n")
        raise Unavailable(message[:300] or "the built-in base model cannot be made", hint=hint[:300] or None)
