"""docs/metrics.md, the dashboard and the alert rules name metrics, labels and codes that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.metrics.docs import PAGE, described, exported, page, table

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docker" / "monitoring"
PART = re.compile(r"_(bucket|sum|count)$")
METRIC = re.compile(r"\b(?:tinsmith|process)_\w+")
SELECTOR = re.compile(r"\b((?:tinsmith|process)_\w+)\{([^}]*)\}")
GIVEN_BY_PROMETHEUS = {"instance", "job", "le"}


def documented() -> dict[str, set[str]]:
    """Metric -> labels, as the page says."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", PAGE.read_text(), flags=re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def expressions() -> list[str]:
    """Everything that Prometheus is asked."""
    dashboard: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    rules: dict[str, Any] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == page(text, table(*described())), "run `make docs`"
    families, _ = described()
    assert {exported(family) for family in families} == set(documented())
    assert all(family.documentation.endswith(".") for family in families)


@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_exists(expression: str) -> None:
    known = documented()
    named = {PART.sub("", name) if PART.sub("", name) in known else name for name in METRIC.findall(expression)}
    assert named <= set(known)
    assert named or expression.startswith("up{")
    for name, selected in SELECTOR.findall(expression):
        labels = set(re.findall(r"(\w+)\s*[=!]~?", selected)) - GIVEN_BY_PROMETHEUS
        assert labels <= known[PART.sub("", name) if PART.sub("", name) in known else name]


def test_codes_and_states_in_the_rules_exist() -> None:
    codes = set(re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE))
    text = (MONITORING / "alerts.yaml").read_text()
    [wanted] = re.findall(r'code=~"([^"]+)"', text)
    assert set(wanted.split("|")) <= codes


def test_every_metric_of_ours_is_shown_or_watched() -> None:
    asked = " ".join(expressions())
    unseen = {name for name in documented() if name.startswith("tinsmith_") and name not in asked}
    assert unseen <= {
        "tinsmith_draining",
        "tinsmith_checkpoints",
        "tinsmith_operations_accepted_total",
        "tinsmith_optimizer_steps_total",
        "tinsmith_trained_tokens_total",
    }
