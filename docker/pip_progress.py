"""Runs pip with the given arguments and tells how far it is: pip itself says either nothing or a line for everything.

    python docker/pip_progress.py install --requirement requirements.lock

In a terminal it is one line that changes, elsewhere a line now and then, all on stderr. What pip complains of is passed
on, and so is its exit code. Only the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

EVERY = 40
"""Packages between two lines where nobody watches."""
_REQUIREMENT = re.compile(r"^[A-Za-z0-9][^\s#]*==", re.MULTILINE)
_LARGE = re.compile(r"Downloading (\S+) \(([\d.]+ (?:[MG]B))\)")
_LARGE_MB = 20.0


def steps(lines: Iterable[str], total: int | None) -> Iterator[tuple[str, bool]]:
    """What to show for pip's lines, and whether it is worth a line of its own where nobody watches."""
    found = 0
    of = f" of {total}" if total else ""
    for line in lines:
        large = _LARGE.search(line)
        if line.startswith(("Collecting ", "Requirement already satisfied", "Obtaining ")):
            found += 1
            yield f"{found}{of} packages", found % EVERY == 0
        elif large is not None and _megabytes(large[2]) >= _LARGE_MB:
            yield f"fetching {large[1].rsplit('/', 1)[-1]} ({large[2]})", True
        elif line.startswith("Installing collected packages"):
            yield "unpacking what was fetched", True


def _megabytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * (1000 if unit == "GB" else 1)


def _wanted(arguments: Sequence[str]) -> int | None:
    """How many packages the requirement files among the arguments pin; None where others come with them."""
    if "--no-deps" not in arguments:
        return None
    files = [value for name, value in itertools.pairwise(arguments) if name in ("-r", "--requirement")]
    return sum(len(_REQUIREMENT.findall(Path(file).read_text(encoding="utf-8"))) for file in files) or None


def main(arguments: Sequence[str]) -> int:
    """Run it; returns pip's exit code."""
    command = [sys.executable, "-m", "pip", *arguments, "--progress-bar", "off", "--disable-pip-version-check"]
    watched = sys.stderr.isatty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace") as pip:
        assert pip.stdout is not None
        for text, own_line in steps(pip.stdout, _wanted(arguments)):
            if watched:
                sys.stderr.write(f"\r\x1b[K  {text}")
            elif own_line:
                sys.stderr.write(f"  {text}\n")
            sys.stderr.flush()
    if watched:
        sys.stderr.write("\r\x1b[K")
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
