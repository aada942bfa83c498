"""As `test_kills.py`, with servers that each compute on a Ray cluster of their own on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import test_kills
from tests.postgres.harness import Cluster, cluster
from tests.support.postgres import Postgres

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, base: Path, postgres: Postgres) -> Iterator[Cluster]:
    """Two servers; the test ends one of them."""
    postgres.create_database("ray")
    with cluster(tmp_path_factory.mktemp("ray"), base, postgres.url("ray"), "--ray", "local") as running:
        yield running


def test_a_killed_server_leaves_its_runs_to_the_other_one(servers: Cluster) -> None:
    test_kills.test_a_killed_server_leaves_its_runs_to_the_other_one(servers)
