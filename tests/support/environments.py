"""Python environments for tests of interpreters: real ones, made in a moment, for they install nothing."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def empty_environment(folder: Path) -> Path:
    """The interpreter of a new environment without any package."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def like_this_one(folder: Path) -> Path:
    """The interpreter of a new environment with the packages of this one, the project itself not among them."""
    python = empty_environment(folder)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "others.py").write_text(f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n")
    (site / "others.pth").write_text("import others\n")
    return python
