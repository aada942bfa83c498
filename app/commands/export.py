"""Writing a checkpoint for other programs: the adapter, or the base model with the adapter in its weights.

Merging runs in a process of its own with the computing library (`engines/merge.py`): neither the server nor this
command imports it. Not responsible for the options (`checkpoints.py`) or for fetching (`transfer.py`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any

from app.commands.client import Server, data_folder
from app.commands.output import fail, working

MERGE_PROGRAM = "engines.merge"
BEGINS_ANEW = (
    "nothing of it was kept: the same command begins anew; `tinsmith checkpoints download` keeps what has arrived, and "
    "goes on where it broke off"
)
"""What to do when a file did not arrive: the workplace, and what arrived in it, is gone."""


class Format(StrEnum):
    """What is written."""

    peft = "peft"
    merged = "merged"
    gguf = "gguf"


class Dtype(StrEnum):
    """Type of merged weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def write_export(
    server: Server,
    about: dict[str, Any],
    route: str,
    output: Path,
    form: Format,
    base: Path | None,
    dtype: Dtype | None,
    data_dir: Path | None,
) -> dict[str, Any]:
    """Write `output`, whole or not at all; returns what is in it. Ends the command if that cannot be done.

    Args:
        about: what the server says of the checkpoint.
        route: that of the checkpoint.
    """
    from app.commands.transfer import fetch_files

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise fail(f"{output} is there already", "choose another folder with --output")
    merges = form is not Format.peft
    if not merges and (base or dtype):
        raise fail("--base and --dtype are for merged weights", "give --format merged, or leave them out")
    source = _base_folder(about["base_model"], base, data_dir) if merges else None
    workplace = output.absolute().with_name(f".{output.absolute().name}.{secrets.token_hex(4)}.tmp")
    try:
        files = [
            each["name"] for each in fetch_files(server, f"{route}/files", workplace / "adapter", remedy=BEGINS_ANEW)
        ]
        if any(name.endswith(".age") for name in files) and merges:
            raise fail("the checkpoint is encrypted", "download it, decrypt its files with `age`, and merge those")
        if source is None:
            made = workplace / "adapter"
        else:
            made = workplace / "merged"
            _merge(source, workplace / "adapter", made, dtype or (Dtype.float16 if form is Format.gguf else None))
        if output.exists():
            output.rmdir()
        made.rename(output)
    except OSError as error:
        raise fail(f"{output} cannot be written ({error.strerror})", "choose another folder with --output") from None
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    names = sorted(path.name for path in output.iterdir())
    return {"tinker_path": about["tinker_path"], "format": form.value, "folder": str(output), "files": names}


def _base_folder(name: str, given: Path | None, data_dir: Path | None) -> Path:
    from app.settings import DEFAULT_BASE_MODEL
    from engines.base_models import built_in_folder

    if given is not None:
        folder = given.expanduser()
    elif name == DEFAULT_BASE_MODEL:
        folder = built_in_folder(data_folder(data_dir))
    else:
        raise fail(f"the weights of {name} are not known here", "give the folder of the base model with --base")
    if not (folder / "config.json").is_file():
        raise fail(f"{folder} is not the folder of a model: it has no config.json", "give it with --base")
    return folder.resolve()


def _merge(base: Path, adapter: Path, output: Path, dtype: Dtype | None) -> None:
    """Run the merging process. Ends the command with its last words if it fails."""
    from engines.environments import with_project

    order = {"base": str(base), "adapter": str(adapter), "output": str(output), "dtype": dtype.value if dtype else None}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-m", MERGE_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**with_project(os.environ), "HF_HUB_OFFLINE": "1"},
        ) as program,
        working(f"merging into {base.name}") as tell,
    ):
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(json.dumps(order))
        program.stdin.close()
        for line in program.stdout:  # what it does now
            tell(line.strip())
        code = program.wait()
        errors.seek(0)
        said = errors.read()
    if code != 0:
        last = (said.strip().splitlines() or [f"it ended with {code}"])[-1]
        raise fail(f"the weights could not be merged: {last}", "nothing was written; see that --base and --dtype fit")
