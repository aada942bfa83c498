"""Environments of their own for libraries whose pins are not the server's: where they are, and what one says of itself.

`python -m engines.environments ENGINE`, run by an environment's interpreter, tells whether the engine can run there.
Imports nothing heavy. Not responsible for building environments (`docker/engine_env.sh`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from engines.registry import capabilities, get_engine
from schemas.errors import TinsmithError, Unavailable

ROOT = Path(__file__).resolve().parents[1]
CHECK_SECONDS = 300.0
"""An interpreter that imports torch takes seconds, and many on a busy machine."""
_TOLD = ("torch", "transformers", "ray")


def environment_python(name: str) -> Path:
    """Where `make engine-venv NAME=name` puts the interpreter."""
    return ROOT / ".engines" / name / "bin" / "python"


def install_hint(name: str, setting: str) -> str:
    """What to do where an environment is missing; `setting` names an interpreter elsewhere."""
    return f"run `make engine-venv NAME={name}`, or set {setting} to an interpreter that has it"


def require_versions(engine: str, wanted: Mapping[str, str]) -> None:
    """Raise `Unavailable` unless this interpreter has these packages in these versions."""
    hint = install_hint(engine, "engine_python")
    for package, version in wanted.items():
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"engine {engine!r} needs the Python package {package!r}", hint=hint)
        found = importlib.metadata.version(package)
        if found != version:
            raise Unavailable(f"engine {engine!r} needs {package} {version}; its environment has {found}", hint=hint)


def engine_interpreter(engine: str, given: str | Path | None = None) -> Path | None:
    """The interpreter that an engine's ranks run in; None = the server's own.

    `given`: the setting, which wins. Raises `InvalidRequest` for an unknown engine.
    """
    name = capabilities(engine).environment
    if given is not None:
        return Path(given).expanduser()
    return None if name is None else environment_python(name)


def check_interpreter(python: Path, what: str, hint: str) -> None:
    """Raise `Unavailable` if there is no program at that path. `what`: who needs it, such as `engine 'veomni'`."""
    if not python.is_file() or not os.access(python, os.X_OK):
        raise Unavailable(f"{what} needs an environment of its own, and there is none", hint=hint)


def check_in(python: Path, engine: str, *, timeout: float = CHECK_SECONDS) -> dict[str, str]:
    """Let the interpreter itself say whether the engine can run in it; returns versions of what it has.

    Raises `Unavailable`: one line that says what is missing, and how to install it.
    """
    what = f"engine {engine!r}"
    hint = install_hint(capabilities(engine).environment or engine, "engine_python")
    check_interpreter(python, what, hint)
    try:
        done = subprocess.run(
            [str(python), "-m", "engines.environments", engine],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=with_project(os.environ),
            check=False,
        )
        answer = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the interpreter of {what} did not answer within {timeout:g} s", hint=hint) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"the interpreter of {what} does not run ({type(error).__name__})", hint=hint) from error
    if "error" in answer:
        raise Unavailable(str(answer["error"]), hint=answer.get("hint") or hint)
    return dict(answer)


def with_project(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which any interpreter finds this project, which is installed in the server's only."""
    env = dict(base)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env


def _say(engine: str) -> Mapping[str, str | None]:
    """What `check_in` reads."""
    try:
        get_engine(engine)
    except TinsmithError as error:
        return {"error": error.message, "hint": error.hint}
    except Exception as error:  # whatever a broken installation raises while it is imported
        return {"error": f"engine {engine!r} cannot be imported ({type(error).__name__}: {error})", "hint": None}
    found = {"python": platform.python_version()}
    for name in _TOLD:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    """Write one line of JSON: versions, or `{"error", "hint"}`."""
    sys.stdout.write("\n" + json.dumps(_say(sys.argv[1])) + "\n")


if __name__ == "__main__":
    main()
