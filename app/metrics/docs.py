"""Writes the table of docs/metrics.md from the metrics themselves: `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from app.metrics.events import Events
from app.metrics.state import Facts, Snapshot

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "| metric | type | labels | what |\n|---|---|---|---|\n", "\n\nIn [docker/monitoring]"
OF_LIBRARIES = "process_"
"""Prefix of what the client library measures of the process: named, with the library's words."""


def exported(family: Metric) -> str:
    """The name under which a scrape has a family."""
    return {"counter": f"{family.name}_total", "info": f"{family.name}_info"}.get(family.type, family.name)


def table(families: Iterable[Metric], labels: Mapping[str, tuple[str, ...]]) -> str:
    """Rows of the table, by name. `labels`: of each family."""
    rows = []
    for family in sorted(families, key=lambda one: (one.name.startswith(OF_LIBRARIES), one.name)):
        shown = ", ".join(f"`{label}`" for label in labels[family.name])
        text = " ".join(family.documentation.split()).replace("|", "\\|")
        rows.append(f"| `{exported(family)}` | {family.type} | {shown} | {text} |")
    return "\n".join(rows)


def page(text: str, rows: str) -> str:
    """The page with this table in it."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + rows + END + rest.partition(END)[2]


def described() -> tuple[list[Metric], dict[str, tuple[str, ...]]]:
    """Every family that a server exports, without a value, and the labels of each."""
    events, process = Events(), CollectorRegistry()
    ProcessCollector(registry=process)
    state = list(Snapshot({}, Facts({}, {})).collect())
    labels = {family.name: tuple(getattr(family, "_labelnames", ())) for family in state}
    labels["tinsmith"] = ("version",)
    families = [*events.registry.collect(), *state, *process.collect()]
    return families, {
        family.name: (*labels.get(family.name, ()), *events.labels.get(family.name, ())) for family in families
    }


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), table(*described())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
