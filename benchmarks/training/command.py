"""`python -m benchmarks training`: measure, print tables and JSON."""

from __future__ import annotations

import argparse
import json
import sys

from app.settings import Settings
from benchmarks.training import cases, report
from benchmarks.training.host import settings_for
from benchmarks.training.measure import measure
from engines.base_models import DEFAULT_MODEL, prepare


def run(given: argparse.Namespace) -> None:
    """All chosen cases. Raises `UnequalWork` or `SideFailed`; what was measured before is printed all the same."""
    data_dir = (given.data_dir or Settings.model_fields["data_dir"].default).expanduser()
    folder = given.model.resolve() if given.model else prepare(DEFAULT_MODEL, None, data_dir)
    options = cases.Options.of(given, folder)
    settings = settings_for(options.threads)
    found = []
    try:
        for case in cases.build(options):
            found.append(measure(case, options.repeats, settings, profile=options.profile))
    finally:
        text = json.dumps(report.as_json(found, options, settings))
        if given.json:
            given.json.write_text(text + "\n")
        sys.stdout.write(report.tables(found, options, settings) + ("\n" if given.json else f"\n\n{text}\n"))
