"""How the tests are shared by processes (`pytest -n 2 --dist loadgroup`): files stay whole, and so do the folders whose
tests share one server, or one cluster. Tests that take minutes each are shared one by one.

And hypothesis' profile for all tests: that which it takes by itself (where CI is set, the same examples each time),
without a deadline.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/docs/", "tests/e2e/", "tests/ray/")
APART = ("tests/fault/test_fail_points.py",)

settings.register_profile("tinsmith", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("tinsmith")


class Groups(LoadScopeScheduling):
    """What belongs together is told from the path; xdist's own groups need node ids that this pytest cannot change."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups | None:
    """For `--dist loadgroup`."""
    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None
