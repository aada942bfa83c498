"""Engine `torchtitan` where torchtitan is not installed: it says so before anything starts."""

from __future__ import annotations

import importlib.util

import pytest

from engines.registry import get_engine
from schemas.errors import Unavailable

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is installed here"
)


def test_what_is_missing_is_named_and_how_to_get_it() -> None:
    with pytest.raises(Unavailable, match="needs the Python package 'torchtitan'") as caught:
        get_engine("torchtitan")
    assert "make engine-venv NAME=torchtitan" in (caught.value.hint or "")
