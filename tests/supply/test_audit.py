"""`make audit` and `make secrets`: what they say of what they are given."""

from __future__ import annotations

import importlib.util
import json
import re
import secrets
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A script of docker/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docker_{name}", ROOT / "docker" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_package_that_could_not_be_looked_up_is_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    audit = load("audit")
    known = {"name": "six", "version": "1.17.0", "vulns": []}
    skipped = {"name": "numpy", "skip_reason": "Dependency not found"}
    bad = {"name": "ray", "version": "2.1", "vulns": [{"id": "CVE-1", "fix_versions": ["2.2"]}]}
    assert audit.report([known]) == 0
    assert audit.report([known, skipped]) == audit.UNKNOWN
    assert "could not be looked up: numpy" in capsys.readouterr().err
    assert audit.report([known, skipped, bad]) == audit.FOUND
    assert "ray 2.1: CVE-1, corrected in 2.2" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["no network", [{"name": "accelerate", "skip_reason": "not found"}]])
def test_a_service_that_does_not_answer_is_said_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: object
) -> None:
    audit = load("audit")
    asked: list[list[str]] = []
    monkeypatch.setattr(audit, "audit", lambda packages, service: asked.append(packages) or answer)
    assert audit.main([]) == audit.UNKNOWN
    assert len(asked) == 1, "one question is enough to find out"
    assert "NOT AUDITED" in capsys.readouterr().err


def test_every_locked_package_and_torch_are_asked_for() -> None:
    pins = load("audit").pins()
    assert any(pin.startswith("torch==") for pin in pins)
    assert any(pin.startswith("starlette==") for pin in pins)
    assert len(pins) > 150


def test_the_form_of_our_keys_is_looked_for() -> None:
    text = (ROOT / "docker" / "tinsmith_key.py").read_text()
    pattern = re.search(r're\.compile\(r"(.+)"\)', text)
    assert pattern is not None
    assert re.search(pattern[1], f"key = 'tml-{secrets.token_urlsafe(32)}'")
    assert not re.search(pattern[1], "tml-...")


def test_known_lines_are_kept_as_hashes() -> None:
    results = json.loads((ROOT / ".secrets.baseline").read_text())["results"]
    assert results
    for entries in results.values():
        assert all(set(entry) <= {"type", "filename", "hashed_secret", "is_verified"} for entry in entries)
