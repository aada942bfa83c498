"""The detector of this server's own API keys, for detect-secrets (`docker/secret_scan.py`)."""

from __future__ import annotations

import re

from detect_secrets.plugins.base import RegexBasedDetector


class TinsmithKeyDetector(RegexBasedDetector):
    """`tml-` and 256 random bits."""

    secret_type = "Tinsmith API key"
    denylist = (re.compile(r"\btml-[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])"),)
