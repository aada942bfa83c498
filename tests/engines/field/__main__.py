"""`make test-engines`: each engine that has an environment of its own is built and tested, one after the other.

    python -m tests.engines.field [--no-build] [ENGINE ...]

An engine whose environment cannot be had is left out, with the reason from its `check`; that is no failure. Ends with
a line for each engine, and with 1 if tests of one failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from engines.environments import ROOT, check_in, environment_python
from engines.registry import ENGINES, capabilities
from schemas.errors import Unavailable

VLLM = "vllm"
HERE = Path(__file__).resolve().parent


def environments() -> list[str]:
    """The engines with an environment of their own."""
    return [name for name in ENGINES if capabilities(name).environment is not None]


def tested(engine: str, build: bool, arguments: list[str]) -> tuple[bool, str]:
    """Build and test one engine: whether nothing failed, and what became of it."""
    environment = capabilities(engine).environment or engine
    if build and subprocess.run([ROOT / "docker" / "engine_env.sh", environment], cwd=ROOT, check=False).returncode:
        return True, "NOT tested: its environment could not be built"
    python = environment_python(environment)
    try:
        found = check_in(python, engine)
    except Unavailable as error:
        return True, f"NOT tested: {error.message} ({error.hint})"
    tests = sorted(HERE.glob(f"test_{engine}*.py"))
    if not tests:
        return False, "there is no test of it"
    done = subprocess.run([python, "-m", "pytest", "-n", "0", *tests, *arguments], cwd=ROOT, check=False)
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    return done.returncode == 0, f"{'passed' if done.returncode == 0 else 'FAILED'} ({versions})"


def sampler_tested(build: bool, arguments: list[str]) -> tuple[bool, str]:
    """As `tested`, for vLLM: its tests run in the server's environment, and start it in its own."""
    if build and subprocess.run([ROOT / "docker" / "engine_env.sh", VLLM], cwd=ROOT, check=False).returncode:
        return True, "NOT tested: its environment could not be built"
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "tests/vllm", *arguments], cwd=ROOT, check=False)
    return done.returncode == 0, "passed, or skipped for the reason above" if done.returncode == 0 else "FAILED"


def main() -> int:
    """Returns 1 if tests failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.field")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help="default: all")
    parser.add_argument("--no-build", action="store_true", help="test in what is there")
    options, arguments = parser.parse_known_args()
    known = [*environments(), VLLM]
    unknown = set(options.engines) - set(known)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no environment of that name; there are {', '.join(known)}")
    good, lines = True, []
    for engine in options.engines or known:
        began = time.monotonic()
        if engine == VLLM:
            fine, what = sampler_tested(not options.no_build, arguments)
        else:
            fine, what = tested(engine, not options.no_build, arguments)
        good &= fine
        lines.append(f"{engine:<12} {time.monotonic() - began:6.0f} s  {what}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
