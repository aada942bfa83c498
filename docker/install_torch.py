"""Installs the torch build that fits this machine: no CUDA download where there is no NVIDIA GPU.

Used by `make setup`. pip's own choice is kept when it is already a CPU build, or when the platform has only one build
(macOS, Arm). On x86-64 Linux pip would fetch a CUDA build of several GB on every machine; there `uv` picks the backend
by looking at the driver (`--torch-backend=auto`). Set TINSMITH_TORCH_BACKEND (`cpu`, `cu128`, ...) to choose by hand,
or to `default` for pip's own choice, whatever this machine has.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"


def installed() -> bool:
    """Whether the pinned torch is importable in this environment already (any local build of it)."""
    wanted = TORCH.partition("==")[2]
    found = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode == 0 and found.stdout.strip().partition("+")[0] == wanted


def pip_would_take_cuda() -> bool:
    """Ask pip (without downloading) which file it would install, and read the build from its name."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    report = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-", TORCH],
        capture_output=True,
        text=True,
        check=True,
    )
    install = json.loads(report.stdout)["install"]
    return bool(install) and "cpu" not in install[0]["download_info"]["url"].rsplit("/", 1)[-1]


def main() -> int:
    if installed():
        return 0
    pip = [sys.executable, str(Path(__file__).with_name("pip_progress.py")), "install"]
    backend = os.environ.get("TINSMITH_TORCH_BACKEND", "auto")
    if backend == "default" or (backend in ("auto", "cpu") and not pip_would_take_cuda()):
        command = [*pip, TORCH]
    else:
        subprocess.run([*pip, "uv==0.13.9"], check=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
        command += [f"--torch-backend={backend}", TORCH]
    sys.stderr.write(f"installing {TORCH} ...\n")
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
