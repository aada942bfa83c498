"""What `docker/engine_env.sh` builds, read from pyproject.toml: its groups of pins, and its table of environments.

    python docker/environments.py                the names of all environments
    python docker/environments.py NAME cpu|gpu   one of them, as assignments of a shell
"""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    """Write what is asked for; returns 2 for an unknown environment."""
    project: dict[str, Any] = tomllib.loads(
        (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )
    known, groups = project["tool"]["tinsmith"]["environments"], project["dependency-groups"]
    if not arguments:
        sys.stdout.write("\n".join(known) + "\n")
        return 0
    name, build = arguments
    if name not in known:
        sys.stderr.write(f"there is no engine environment {name!r}; there are: {', '.join(known)}\n")
        return 2
    facts = {
        "group": f"{name}-cpu" if build == "cpu" and f"{name}-cpu" in groups else name,
        "package": known[name]["package"],
        "unwanted": " ".join(known[name].get("unwanted-on-cpu", [])) if build == "cpu" else "",
        "serve": known[name]["serve"],
    }
    sys.stdout.write("\n".join(f"{key}={shlex.quote(value)}" for key, value in facts.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
