"""docs/reference.md names every setting, error and metric; each test that it names is there and names them."""

from __future__ import annotations

import re

import pytest

from tests.docs import covered

PAGE = (covered.DOCS / "reference.md").read_text(encoding="utf-8")
EVERYTHING = covered.everything()


def section(kind: str) -> str:
    return PAGE.split(f"\n## {kind.capitalize()}s\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("kind", list(EVERYTHING))
def test_what_is_documented_is_on_the_page(kind: str) -> None:
    """Run `make docs` if not."""
    without = set(re.findall(r"`([^`]+)`", (re.findall(r"No test names: (.*)\.$", section(kind), re.M) or [""])[0]))
    assert without == {name for name, tests in EVERYTHING[kind].items() if not tests}
    rows = re.findall(r"^\| `([^`]+)` \|", section(kind), re.M)
    assert rows == [name for name, tests in EVERYTHING[kind].items() if tests]


@pytest.mark.parametrize("kind", list(EVERYTHING))
def test_the_tests_on_the_page_name_what_they_are_named_for(kind: str) -> None:
    for name, cell in re.findall(r"^\| `([^`]+)` \| (.*) \|$", section(kind), re.M):
        named = re.findall(r"\]\(\.\./(tests/[^)]+)\)(?: `(\w+)`)?", cell)
        assert named, name
        for path, function in named:
            assert (path, function) in EVERYTHING[kind][name], f"{name}: {path} {function} (run `make docs`)"


def test_the_search_finds_what_is_there_and_nothing_else() -> None:
    """Names that no test has, and one of each kind that some test must have."""
    absent = "no" + "_such_name"
    found = covered.tests_of_setting(absent) | covered.tests_of_error(absent) | covered.tests_of_metric(absent)
    assert found == set()
    assert covered.tests_of_setting("max_rank")
    assert covered.tests_of_error("seq_id_conflict")
    assert covered.tests_of_metric("loss:sum")
