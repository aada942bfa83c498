"""Runs the smoke script with several versions of the SDK against one server: `python -m tests.compat.versions`.

Responsible for one folder per version under `.compat/` (the SDK's package alone: everything that it imports is in the
environment that runs this), for the server, and for `docs/compatibility.md`. Not responsible for what is called
(`tests/compat/smoke_client.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.server import RunningServer, environment, serve
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / ".compat", ROOT / "docs/compatibility.md"
SMOKE = Path(__file__).with_name("smoke_client.py")
MODEL = "acme/tiny"
SMOKE_SECONDS = 180

VERSIONS = {
    "0.16.1": "JSON bodies and JSON results everywhere, `/forward`; no `/client/config`",
    "0.18.2": "JSON bodies and results; `/client/config` read at start",
    "0.25.0": "protobuf bodies (chunks sent side by side), protobuf results, `/client/dynamic_config`",
    "0.30.4": "the same, and sessions that are finished by `close()`",
    "0.38.0": "the version that all tests use: creation and sampling through futures, create-via-load",
}
"""What each version does differently on the wire."""

HEADER = """# Versions of the SDK

Made by `make compat`: one server, and the same script (`tests/compat/smoke_client.py`) with each version of the
`tinker` package. A step is absent where that version of the SDK has no such method.

"""


def install(version: str) -> Path:
    """The folder with that version of the SDK and nothing else; installed once."""
    folder = FOLDER / version
    if not (folder / f"tinker-{version}.dist-info").is_dir():
        line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
        subprocess.run([*line, "--disable-pip-version-check", f"tinker=={version}"], check=True)
    return folder


def walk(server: RunningServer, folder: Path) -> Mapping[str, Any]:
    """Run the script with the SDK of `folder` in front of the one of this environment; what it reported."""
    done = subprocess.run(
        [sys.executable, str(SMOKE), server.url, server.key, MODEL],
        env=environment({"PYTHONPATH": str(folder), "TINKER_TELEMETRY": "1"}),
        capture_output=True,
        text=True,
        timeout=SMOKE_SECONDS,
        check=False,
    )
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"the script said nothing:\n{done.stderr[-4000:]}")
    report: Mapping[str, Any] = json.loads(done.stdout)
    if report["version"] != folder.name:
        raise RuntimeError(f"version {report['version']} ran instead of {folder.name}")
    return report


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """The page: a line for each version, then a line for each step."""
    lines = ["| version | steps passed | absent | failed | on the wire |", "|---|---|---|---|---|"]
    for report in reports:
        steps = report["steps"]
        absent = [name for name, outcome in steps.items() if outcome == "absent"]
        failed = [name for name, outcome in steps.items() if outcome not in ("ok", "absent")]
        passed = f"{len(steps) - len(absent) - len(failed)} of {len(steps) - len(absent)}"
        columns = [report["version"], passed, ", ".join(absent) or "none", ", ".join(failed) or "none"]
        lines.append(f"| {' | '.join(columns)} | {VERSIONS.get(report['version'], '')} |")
    lines += ["", "The steps, in order:", ""]
    lines += [f"{number}. {name.replace('_', ' ')}" for number, name in enumerate(reports[0]["steps"], 1)]
    return HEADER + "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run, write the page (of the usual versions only); 1 if a step of a version failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="versions of the SDK (default: those of the page)")
    chosen = parser.parse_args(arguments).versions
    folders = [install(version) for version in chosen or VERSIONS]
    reports = []
    with tempfile.TemporaryDirectory() as scratch:
        tiny = make_tiny_model(Path(scratch) / "tiny")
        served = ["--base-model", f"{MODEL}={tiny}", "--threads", "1", "--shutdown-grace", "2"]
        with serve(Path(scratch) / "data", served) as server:
            for folder in folders:
                report = walk(server, folder)
                reports.append(report)
                sys.stdout.write(f"tinker {report['version']}: {report['seconds']} s\n")
                for name, outcome in report["steps"].items():
                    if outcome != "ok":
                        sys.stdout.write(f"  {name}: {outcome}\n")
    if not chosen:
        PAGE.write_text(page(reports))
    return int(any(outcome not in ("ok", "absent") for each in reports for outcome in each["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
