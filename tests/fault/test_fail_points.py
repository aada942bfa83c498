"""Every numbered place is where the server, its worker, or both are killed; the clients finish, and nothing differs.

The ordinary suite kills at a few places of great consequence; `-m exhaustive` kills everybody at every place, and at
both ends of every kind of operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from app.doctor import check_data_folder
from schemas.fail_points import POINTS
from tests.fault.harness import Kill, fail_at, serving
from tests.fault.programs import KINDS, OPTIONS, together
from tests.fault.test_object_storage import UPLOAD_PLACES

PLACES = {
    "training": {
        "accept.before_row": 3,
        "accept.after_row": 5,
        "refusal.recorded": 1,
        "turn.before_call": 2,
        "turn.after_call": 2,
        "adapter.created": 1,
        "forward_backward.opened": 2,
        "forward_backward.computed": 3,
        "optim_step.taken": 2,
        "zero_grad.done": 1,
        "result.before_row": 3,
        "result.after_row": 3,
        "failure.before_row": 1,
        "failure.after_row": 1,
    },
    "coming back": {
        "snapshot.captured": 1,
        "snapshot.written": 1,
        "snapshot.renamed": 1,
        "snapshot.before_row": 1,
        "snapshot.after_row": 1,
        "start.swept": 1,
        "recover.before_restore": 2,
        "restore.done": 1,
        "recover.replayed": 2,
        "load.done": 1,
    },
    "weights": {
        "save.begun": 1,
        "save.written": 1,
        "checkpoint.forgotten": 1,
        "expiry.found": 1,
        "copy.linked": 1,
        "copy.recorded": 1,
        "export.encrypted": 1,
        "sampler.created": 1,
        "sample.turn": 1,
        "adapter.removed": 1,
        "session.over": 1,
    },
    "overwriting": {"checkpoint.replaced": 1},
}
"""The time that a process comes to the place at which the kill is done. As many deaths as a run of a minute or two has
room for are in a group. What was overwritten is removed a moment later, so a death on the way would come before."""
WITHOUT_A_WORKER = {"start.swept"}
"""Places at which the server has none."""
RANK_PLACES = ("gradient.reduce",)
"""Of a worker of several ranks: `test_ranks.py`."""
FEW = (
    Kill("accept.after_row", "edge", 5),
    Kill("forward_backward.computed", "worker", 4),
    Kill("snapshot.renamed", "edge"),
    Kill("save.written", "worker"),
    Kill("result.before_row:optim_step", "tree", 3),
)


def test_every_place_is_in_a_test() -> None:
    named = [*(place for places in PLACES.values() for place in places), *UPLOAD_PLACES, *RANK_PLACES]
    assert sorted(named) == sorted(POINTS), "a place that no test kills at proves nothing"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, object]:
    """What the clients have in the end when nobody dies."""
    with serving(tmp_path_factory.mktemp("undisturbed"), base, *OPTIONS) as service:
        found = together(service)
        kinds = {kind for (kind,) in service.rows("SELECT DISTINCT kind FROM operations")}
        assert kinds - {"copy_weights", "refused"} == set(KINDS), "a kind that no client asks for proves nothing"
        return found


@pytest.mark.exhaustive
def test_a_few_deaths_at_the_worst_places_change_nothing(tmp_path: Path, base: Path) -> None:
    """The undisturbed run is on the same server, after the last of the deaths."""
    markers = tmp_path / "markers"
    with serving(tmp_path, base, *OPTIONS, fail_at=fail_at(markers, FEW)) as service:
        found = together(service, 2)
        _everybody_died(markers, FEW)
        starts = service.starts
        _same(found, together(service, 2))
        assert service.starts == starts


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("victim", ["edge", "worker", "tree"])
def test_whoever_dies_at_any_place_changes_nothing(
    tmp_path: Path, base: Path, expected: dict[str, object], victim: str, places: str
) -> None:
    kills = [
        Kill(place, victim, hit)
        for place, hit in PLACES[places].items()
        if victim == "edge" or place not in WITHOUT_A_WORKER
    ]
    _compare(tmp_path, base, expected, kills)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("place", "victim"), [("accept.after_row", "edge"), ("result.before_row", "tree")])
def test_a_death_at_either_end_of_any_kind_of_operation_changes_nothing(
    tmp_path: Path, base: Path, expected: dict[str, object], place: str, victim: str
) -> None:
    _compare(tmp_path, base, expected, [Kill(f"{place}:{kind}", victim) for kind in KINDS])


def _compare(folder: Path, base: Path, expected: Mapping[str, object], kills: list[Kill]) -> None:
    """Run the clients on a server that dies so often, and compare what they have."""
    markers = folder / "markers"
    with serving(folder, base, *OPTIONS, fail_at=fail_at(markers, kills)) as service:
        found = together(service)
        _everybody_died(markers, kills)
        service.kill_server()
        service.wait_for_start()  # which removes what the deaths left half done
    _same(found, expected)
    checks = check_data_folder(service.data_dir)
    assert all(check.status == "ok" for check in checks), checks


def _everybody_died(markers: Path, kills: Iterable[Kill]) -> None:
    missing = {kill.name for kill in kills} - {marker.name for marker in markers.iterdir()}
    assert not missing, f"nobody died at {missing}"


def _same(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == value, name
