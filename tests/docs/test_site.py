"""The documentation's site: every page has its place, and it is built strictly and without anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".site" / "bin" / "mkdocs"
CONFIGURATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)="?((?:https?:)?//[^\s">]+)""")


def test_every_page_has_one_place() -> None:
    placed = [
        page for part in CONFIGURATION["nav"] for pages in part.values() for each in pages for page in each.values()
    ]
    assert len(placed) == len(set(placed))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    notebooks = {f"examples/{each.stem}.md" for each in (ROOT / "examples").glob("*.ipynb")}
    assert set(placed) == pages | notebooks | {"changelog.md", "threats.md"}


def test_the_picture_is_readable_on_any_ground() -> None:
    """All text stands on a filled box; what stands on the page itself is of one grey."""
    picture = (ROOT / "docs" / "img" / "concepts.svg").read_text()
    assert set(re.findall(r'stroke="(#\w+)" stroke-width="2"', picture)) == {"#8a919c"}
    assert "<title" in picture
    assert "<desc" in picture


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="no environment for the site (make site)")
def test_the_site_is_complete_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    loaded = {page.name: LOADED.findall(page.read_text()) for page in pages}
    assert {name: addresses for name, addresses in loaded.items() if addresses} == {}
    assert (tmp_path / "site" / "search" / "search_index.js").stat().st_size > 100_000
    # A link that leaves docs/ leads to a copy of the file.
    assert (tmp_path / "site" / "source" / "openapi.yaml").read_text() == (ROOT / "openapi.yaml").read_text()
