"""Every numbered place on the way of an operation is where a process dies; the clients finish, and nothing differs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tinker import types

from schemas.fail_points import POINTS
from tests.fault.harness import CLIENT_SECONDS, MODEL, RAW_DATA, Raw, Service, fail_at, sdk, serving, train

OPTIONS = ("--snapshot-operations", "4", "--snapshot-share", "1", "--sweep-interval", "1")
WORKER_PLACES = {
    "forward_backward.opened": 3,
    "forward_backward.computed": 4,
    "optim_step.taken": 2,
    "zero_grad.done": 1,
    "save.begun": 1,
    "save.written": 1,
    "load.done": 1,
    "snapshot.captured": 1,
    "snapshot.written": 1,
    "snapshot.renamed": 1,
    "restore.done": 2,
    "sample.turn": 1,
}
"""Of the worker: which time that it comes there it dies."""
SERVER_PLACES = {
    "accept.before_row": 6,
    "accept.after_row": 9,
    "turn.before_call": 2,
    "turn.after_call": 2,
    "result.before_row": 3,
    "result.after_row": 3,
    "snapshot.before_row": 1,
    "snapshot.after_row": 1,
    "recover.before_restore": 2,
    "recover.replayed": 2,
    "checkpoint.forgotten": 1,
}
RANK_PLACES = ("gradient.reduce",)
"""Of a worker of several ranks: `test_ranks.py`."""


def test_every_place_is_in_a_test() -> None:
    named = {*WORKER_PLACES, *SERVER_PLACES, *RANK_PLACES}
    assert named == set(POINTS), "a place that no test kills at proves nothing"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, object]:
    """What the clients have in the end when nobody dies."""
    with serving(tmp_path_factory.mktemp("undisturbed"), base, *OPTIONS) as service:
        return _everything(service)


def test_a_worker_that_dies_at_any_place_changes_nothing(
    tmp_path: Path, base: Path, expected: dict[str, object]
) -> None:
    _compare(tmp_path, base, expected, WORKER_PLACES)


def test_a_server_that_dies_at_any_place_changes_nothing(
    tmp_path: Path, base: Path, expected: dict[str, object]
) -> None:
    _compare(tmp_path, base, expected, SERVER_PLACES, tree=("turn.after_call", "result.before_row"))


def _compare(
    folder: Path,
    base: Path,
    expected: Mapping[str, object],
    places: Mapping[str, int],
    tree: tuple[str, ...] = (),
) -> None:
    """Run the clients on a server that dies at each of the places, and compare what they have."""
    markers = folder / "markers"
    with serving(folder, base, *OPTIONS, fail_at=fail_at(markers, dict(places), tree=tree)) as service:
        found = _everything(service)
    missing = set(places) - {marker.name for marker in markers.iterdir()}
    assert not missing, f"nobody died at {missing}"
    for name, value in expected.items():
        assert found[name] == value, name


def _everything(service: Service) -> dict[str, object]:
    """Two clients at once; what they have in the end."""
    with ThreadPoolExecutor(2) as threads:
        sdk_client, raw_client = threads.submit(_sdk_program, service), threads.submit(_raw_program, service)
        return {**sdk_client.result(timeout=CLIENT_SECONDS), **raw_client.result(timeout=CLIENT_SECONDS)}


def _sdk_program(service: Service) -> dict[str, object]:
    with sdk(service) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=3).result()
        train(training, 8)
        middle = training.save_state("middle").result(timeout=CLIENT_SECONDS).path
        train(training, 2)
        training.load_state(middle).result(timeout=CLIENT_SECONDS)
        train(training, 6)
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=5)
        drawn = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, params).result(timeout=CLIENT_SECONDS)
        final = training.save_state("final").result(timeout=CLIENT_SECONDS).path
        model_id = final.removeprefix("tinker://").split("/")[0]
        return {
            "middle": service.saved(middle),
            "final": service.saved(final),
            "drawn": [list(sequence.tokens) for sequence in drawn.sequences],
            "outcomes": service.outcomes(model_id),
            "tokens": service.tokens(model_id.split(":")[0]),
        }


def _raw_program(service: Service) -> dict[str, object]:
    """Clears gradients, which the SDK cannot, and deletes a checkpoint."""
    raw = Raw(service)
    session = raw.call("POST", "create_session", sdk_version="test")["session_id"]
    lora = {"rank": 4, "seed": 9}
    created = raw.do("create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config=lora)
    model, seq = created["model_id"], 0
    for step in range(5):
        for route, body in (
            ("forward_backward", {"data": RAW_DATA, "loss_fn": "cross_entropy"}),
            ("zero_grad", {}),
            ("forward_backward", {"data": RAW_DATA, "loss_fn": "cross_entropy"}),
            ("optim_step", {"adam_params": {"learning_rate": 0.01 / (1 + step)}}),
        ):
            seq += 1
            raw.do(route, model_id=model, seq_id=seq, **body)
    kept = raw.do("save_weights", model_id=model, seq_id=seq + 1, path="raw")["path"]
    saved = service.saved(kept)
    gone = raw.do("save_weights", model_id=model, seq_id=seq + 2, path="gone")["path"]
    raw.delete(f"training_runs/{model}/checkpoints/weights/gone")
    assert gone.endswith("gone")
    return {"raw": saved, "raw outcomes": service.outcomes(model)}
