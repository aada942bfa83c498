"""Asks for known vulnerabilities of every locked package: `make audit`.

Runs pip-audit, in the environment of docker/audit-requirements.txt, on the versions in requirements.lock and on that of
torch. Ends with 0 only if every package was looked up and nothing was found, with 1 if something was found, and with 2
if a package could not be looked up: an index that knows no advisories must not read as one without findings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOUND, UNKNOWN = 1, 2


def pins() -> list[str]:
    """`name==version` of every package, in order."""
    locked = re.findall(r"^([\w.-]+==[^\s;]+)", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    torch = re.search(
        r'^TORCH = "(.+)"', (ROOT / "docker" / "install_torch.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert torch is not None
    return [*locked, torch[1]]


def audit(packages: list[str], service: str) -> list[dict[str, Any]] | str:
    """What pip-audit says of each package; a text if it says nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages))
        file.flush()
        command = [
            Path(sys.executable).with_name("pip-audit"),
            "--requirement",
            file.name,
            "--no-deps",
            "--disable-pip",
        ]
        command += ["--format", "json", "--progress-spinner", "off", "--vulnerability-service", service]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except ValueError:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]


def report(answers: list[dict[str, Any]]) -> int:
    """Say what was found and what is unknown; returns the exit code."""
    unknown = [one for one in answers if "vulns" not in one]
    found = [(one, vulnerability) for one in answers for vulnerability in one.get("vulns", ())]
    for one in unknown:
        sys.stderr.write(f"could not be looked up: {one['name']} ({one.get('skip_reason', 'no reason given')})\n")
    for one, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
        sys.stderr.write(f"{one['name']} {one['version']}: {vulnerability['id']}, corrected in {fixed}\n")
    sys.stderr.write(f"{len(answers)} packages: {len(found)} vulnerabilities, {len(unknown)} packages unknown\n")
    return FOUND if found else UNKNOWN if unknown else 0


def main(arguments: list[str]) -> int:
    service = arguments[0] if arguments else "pypi"
    packages = pins()
    first = audit(packages[:1], service)  # before all the others: one question tells whether there is an answer
    if isinstance(first, str) or not any("vulns" in one for one in first):
        why = first if isinstance(first, str) else first[0].get("skip_reason", "no answer")
        sys.stderr.write(f"NOT AUDITED: the vulnerability service {service!r} does not answer here ({why}).\n")
        sys.stderr.write("Nothing is known about any package. Run it where the service can be reached.\n")
        return UNKNOWN
    rest = audit(packages[1:], service)
    if isinstance(rest, str):
        sys.stderr.write(f"NOT AUDITED: {rest}\n")
        return UNKNOWN
    return report([*first, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
