"""Contracts are helpers that assert: their failures are explained like those of tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.workers.group_contract", "tests.workers.runtime_contract")
