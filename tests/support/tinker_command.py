"""Running the official `tinker` command in a process of its own.

Nearly all of the time of a command goes into importing what it needs, so processes are forked from one that has done
that already (`multiprocessing`'s fork server) and then run the command's own entry point; `fresh` starts the installed
program instead.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

TINKER = Path(sys.executable).with_name("tinker")
CRASHES = 2
"""How often the command may die by a signal before that counts. Rarely (about one start in fifty) it ends without a
word, which no answer of a server can cause; everything that it says itself is a result at once."""
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tinker", "tinker.cli.__main__", __name__])


def run_tinker(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    stdin: str = "",
    seconds: float = 120,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `tinker ARGUMENTS` in `folder`, with exactly this environment."""
    start = _start if fresh else _fork
    for _ in range(CRASHES + 1):
        done = start(arguments, environment, folder, stdin, seconds)
        if done.returncode >= 0:
            break
    return done


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, stdin: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TINKER, *arguments],
        env=dict(environment),
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def _fork(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, stdin: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name, stream) for stream in ("stdin", "stdout", "stderr")]
        for stream in streams:
            stream.write_text(stdin if stream.name == "stdin" else "")
        process = _FORKING.Process(target=_command, args=(list(arguments), dict(environment), folder, streams))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["tinker", *arguments], seconds)
        _, said, complained = (stream.read_text() for stream in streams)
        return subprocess.CompletedProcess(["tinker", *arguments], process.exitcode, said, complained)


def _command(arguments: list[str], environment: dict[str, str], folder: Path, streams: list[Path]) -> None:
    """In the new process: become the command."""
    for number, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["tinker", *arguments]
    [command] = entry_points(group="console_scripts", name="tinker")
    sys.exit(command.load()())
