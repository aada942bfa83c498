"""The Python environment of the cookbook: made once from pinned versions, on top of the project's own packages.

Not responsible for the server's environment, which it only reads: torch and transformers are not installed twice.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def ensure(folder: Path) -> Path:
    """The interpreter of the environment in `folder`, made or brought up to date first (about a minute, by pip).

    Raises `subprocess.CalledProcessError` if a package cannot be installed.
    """
    python = folder / "bin" / "python"
    stamp = folder / "requirements.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site_packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site_packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(REQUIREMENTS)]
    subprocess.run(install, check=True)
    stamp.write_text(wanted)
    return python
