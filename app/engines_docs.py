"""The table of engines in `docs/engines.md`, made from what they declare so that the two cannot differ.

    python -m app.engines_docs [FILE]

Not responsible for what the engines do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from engines.capabilities import Capabilities
from engines.registry import ENGINES, capabilities

_PART = re.compile(r"(<!-- matrix: [^\n]*-->\n).*?(<!-- /matrix -->)", re.DOTALL)

_ROWS: tuple[tuple[str, Callable[[Capabilities], str]], ...] = (
    ("devices", lambda can: ", ".join(f"`{each}`" for each in can.devices)),
    ("several ranks", lambda can: _yes(can.several_ranks)),
    ("many adapters in one pass", lambda can: _yes(can.many_adapters)),
    ("several datums in one row of a pass", lambda can: "where it can" if can.packed else "no"),
    ("tensor parallel", lambda can: _yes(can.tensor_parallel)),
    ("pipeline parallel", lambda can: _yes(can.pipeline_parallel)),
    ("optimizers", lambda can: ", ".join(f"`{each}`" for each in can.optimizers)),
    ("modalities", lambda can: ", ".join(can.modalities)),
    ("samplers", lambda can: ", ".join("an address" if each == "external" else f"`{each}`" for each in can.samplers)),
    ("environment", lambda can: "the server's" if can.environment is None else f"`{can.environment}`"),
)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def matrix() -> str:
    """The table: a column for each engine, in the order of the registry."""
    engines = [capabilities(name) for name in ENGINES]
    lines = ["| | " + " | ".join(f"`{can.engine}`" for can in engines) + " |", "|---" * (len(engines) + 1) + "|"]
    lines += [f"| {title} | " + " | ".join(tell(can) for can in engines) + " |" for title, tell in _ROWS]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table of today in place of what is between its two marks. Raises `ValueError` without them."""
    found, count = _PART.subn(lambda marks: f"{marks[1]}{matrix()}{marks[2]}", text)
    if count != 1:
        raise ValueError("the page has no place for the table of engines")
    return found


def main() -> None:
    """Write the table into the page."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/engines.md")
    target.write_text(page(target.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
