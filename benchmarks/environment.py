"""Python environments of programs that are not the project's, made once on top of the project's own packages.

Not responsible for the server's environment, which it only reads: torch and transformers are not installed twice.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path


def ensure(folder: Path, requirements: Path) -> Path:
    """The interpreter of the environment in `folder`, made or brought up to date first (about a minute, by pip).

    `requirements` is installed without what it depends on, so it must name everything that the project lacks. Raises
    `subprocess.CalledProcessError` if a package cannot be installed.
    """
    python = folder / "bin" / "python"
    stamp = folder / "requirements.sha256"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site_packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site_packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(requirements)]
    subprocess.run(install, check=True)
    stamp.write_text(wanted)
    return python
