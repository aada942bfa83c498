"""Looks for secrets in tracked files, or in everything that git remembers: `make secrets`, `make secrets-history`.

Runs detect-secrets, in the environment of docker/lint-requirements.txt, without asking any network;
`docker/tinsmith_key.py` adds this server's own keys. What is known and is no secret is in .secrets.baseline, by hash:
`make secrets ARGS=--accept` writes it anew, for review as part of a change.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from detect_secrets import SecretsCollection
from detect_secrets.core import baseline
from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.core.potential_secret import PotentialSecret
from detect_secrets.core.scan import scan_file
from detect_secrets.settings import transient_settings

ROOT = Path(__file__).parents[1]
BASELINE = ".secrets.baseline"
PICTURE = r'^\s*"image/png": "[A-Za-z0-9+/=]+'
"""A line of a notebook that is a plot."""
GENERATED = (".lock", "package-lock.json", "openapi.yaml", ".secrets.baseline")
"""Files that no person wrote."""


def settings() -> dict[str, object]:
    """Every detector that detect-secrets has, and ours; nothing is verified over a network."""
    names = sorted({one.__name__ for one in get_mapping_from_secret_type_to_class().values()})
    get_mapping_from_secret_type_to_class.cache_clear()  # it is read again with ours in it
    ours = {"name": "TinsmithKeyDetector", "path": f"file://{ROOT / 'docker' / 'tinsmith_key.py'}"}
    chosen = [{"name": name} for name in names if name != ours["name"]]
    for one in chosen:
        one |= {"Base64HighEntropyString": {"limit": 4.5}, "HexHighEntropyString": {"limit": 3.0}}.get(one["name"], {})
    filters = ("heuristic.is_sequential_string", "heuristic.is_potential_uuid", "heuristic.is_templated_secret")
    filters += ("heuristic.is_prefixed_with_dollar_sign", "heuristic.is_not_alphanumeric_string")
    filters += ("heuristic.is_indirect_reference", "heuristic.is_likely_id_string", "allowlist.is_line_allowlisted")
    return {
        "plugins_used": [*chosen, ours],
        "filters_used": [
            *({"path": f"detect_secrets.filters.{name}"} for name in filters),
            {"path": "detect_secrets.filters.regex.should_exclude_line", "pattern": [PICTURE]},
        ],
    }


def _scan(path: str) -> list[PotentialSecret]:
    return list(scan_file(path))


def scanned(paths: Iterable[str]) -> Iterator[PotentialSecret]:
    """What looks like a secret in these files, two at a time."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for found in pool.imap_unordered(_scan, paths, chunksize=16):
            yield from found


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout.decode(
        errors="replace"
    )


def tracked() -> list[str]:
    """Tracked files that somebody wrote."""
    return [name for name in git("ls-files").splitlines() if not name.endswith(GENERATED)]


def remembered(folder: Path) -> Iterator[str]:
    """Every version of every file of every branch, each once, as files in `folder`."""
    for line in git("rev-list", "--all", "--objects").splitlines():
        name, _, path = line.partition(" ")
        if path and not path.endswith(GENERATED) and git("cat-file", "-t", name).strip() == "blob":
            file = folder / name / Path(path).name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(
                subprocess.run(["git", "cat-file", "blob", name], cwd=ROOT, capture_output=True, check=True).stdout
            )
            yield str(file)


def known() -> set[str]:
    """Hashes of what was looked at and is no secret."""
    file = ROOT / BASELINE
    results = json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else {}
    return {one["hashed_secret"] for entries in results.values() for one in entries}


def main(arguments: list[str]) -> int:
    with transient_settings(settings()):
        if "--accept" in arguments:
            collection = SecretsCollection()
            for one in scanned(tracked()):
                collection[one.filename].add(one)
            results = baseline.format_for_output(collection, is_slim_mode=True)["results"]
            (ROOT / BASELINE).write_text(json.dumps({"results": results}, indent=2) + "\n", encoding="utf-8")
            return 0
        if "--history" in arguments:
            with tempfile.TemporaryDirectory() as folder:
                found = [one for one in scanned(list(remembered(Path(folder)))) if one.secret_hash not in known()]
                lines = {
                    (one.secret_hash, "/".join(one.filename.split("/")[-2:]), one.line_number, one.type)
                    for one in found
                }
        else:
            found = [one for one in scanned(tracked()) if one.secret_hash not in known()]
            lines = {(one.secret_hash, one.filename, one.line_number, one.type) for one in found}
    for _, place, number, kind in sorted(lines, key=lambda one: one[1:]):
        sys.stderr.write(f"{place}:{number}: {kind}\n")
    if lines:
        sys.stderr.write(
            "These look like secrets. Take them out and change them; if they are none: make secrets ARGS=--accept\n"
        )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
