"""The files of an adapter folder and their checksums, without a library that computes.

The server and its tools look here; what is inside the tensors is `peft_format.py`'s. Not responsible for writing.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Collection
from pathlib import Path

FORMAT_VERSION = 1
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "tinsmith.json"


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 (hex) of each file that the manifest of an adapter folder names; empty if it cannot be read."""
    try:
        sums = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["sha256"]
        return {str(name): str(value) for name, value in dict(sums).items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def folder_problems(folder: Path, only: Collection[str] | None = None) -> list[str]:
    """What is wrong with an adapter folder: every file that its manifest names must be there with its checksum.

    Reads every byte, of `only` those files if given. Returns short sentences with the names of files inside the folder
    and no path; an empty list is a folder that is whole.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        version, sums = manifest["format_version"], dict(manifest["sha256"])
    except FileNotFoundError:
        return [f"{MANIFEST_FILE} is missing"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return [f"{MANIFEST_FILE} is not readable"]
    if version != FORMAT_VERSION:
        return [f"it has format version {version!r}; this version reads {FORMAT_VERSION}"]
    needed = {CONFIG_FILE, WEIGHTS_FILE} | ({OPTIMIZER_FILE} if manifest.get("optimizer") else set())
    problems = [f"{MANIFEST_FILE} has no checksum of {name}" for name in sorted(needed - sums.keys())]
    for name, expected in sorted(sums.items()):
        problem = _file_problem(folder / str(name), expected) if only is None or name in only else None
        if problem is not None:
            problems.append(f"{name} {problem}")
    return problems


def _file_problem(path: Path, expected: object) -> str | None:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a regular file"
        found = sha256_of(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or 'input/output error'})"
    return None if found == expected else "does not match its checksum"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hex. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
