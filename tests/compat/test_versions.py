"""docs/compatibility.md is what `make compat` wrote for the versions and the steps of today, and every step passed."""

from __future__ import annotations

from typing import Any

from tests.compat import smoke_client, versions


def report(version: str, **outcomes: str) -> dict[str, Any]:
    """What the script reports, all well unless said otherwise."""
    return {"version": version, "seconds": 1.0, "steps": {**dict.fromkeys(smoke_client.STEPS, "ok"), **outcomes}}


def test_the_checked_in_page_is_of_these_versions_and_steps() -> None:
    text = versions.PAGE.read_text()
    empty = versions.page([report(version) for version in versions.VERSIONS])
    assert text.startswith(versions.HEADER)
    steps = "The steps, in order:"
    assert text.partition(steps)[2] == empty.partition(steps)[2]
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| 0.")]
    assert [columns[0].strip("| ") for columns in lines] == list(versions.VERSIONS)
    assert {columns[3] for columns in lines} == {"none"}


def test_a_failed_step_is_named_and_an_absent_one_is_not_counted() -> None:
    [line] = [
        line
        for line in versions.page([report("0.30.4", sample="ValueError: x", close="absent")]).splitlines()
        if line.startswith("| 0.30.4")
    ]
    steps = len(smoke_client.STEPS)
    assert line.startswith(f"| 0.30.4 | {steps - 2} of {steps - 1} | close | sample |")
