"""An operation that takes the server and its worker down together, each time: it fails, and everything else goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas.fail_points import POINTS
from tests.fault.harness import CLIENT_SECONDS, MODEL, RAW_DATA, Raw, Service, serving
from workers.recovery import MAX_SERVER_DEATHS

STEPS = 6


def _new(raw: Raw, seed: int) -> str:
    session = raw.call("POST", "create_session", sdk_version="test")["session_id"]
    lora = {"rank": 4, "seed": seed}
    created = raw.do("create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config=lora)
    return str(created["model_id"])


def _run(raw: Raw, model: str, seq: int, route: str) -> dict[str, object]:
    """One operation; its outcome, whatever it is."""
    body: dict[str, object] = {"data": RAW_DATA, "loss_fn": "cross_entropy"} if route == "forward_backward" else {}
    if route == "optim_step":
        body = {"adam_params": {"learning_rate": 0.01}}
    request_id = raw.call("POST", route, model_id=model, seq_id=seq, **body)["request_id"]
    return raw.call("POST", "retrieve_future", request_id=request_id)


def _save(service: Service, raw: Raw, model: str, seq: int) -> dict[str, bytes]:
    return service.saved(raw.do("save_weights", model_id=model, seq_id=seq, path="end")["path"])


def _bystander(service: Service) -> dict[str, bytes]:
    """Another model, which only trains."""
    raw = Raw(service)
    model = _new(raw, 2)
    for seq in range(1, 2 * STEPS, 2):
        for offset, route in enumerate(("forward_backward", "optim_step")):
            assert "error" not in _run(raw, model, seq + offset, route)
    return _save(service, raw, model, 2 * STEPS + 1)


def _victim(service: Service, *routes: str) -> tuple[list[object], dict[str, bytes]]:
    """The codes of the errors of a model's operations (None: it was done), and its end."""
    raw = Raw(service)
    model = _new(raw, 1)
    codes = [_run(raw, model, seq, route).get("code") for seq, route in enumerate(routes, start=1)]
    return codes, _save(service, raw, model, len(routes) + 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_what_kills_the_whole_tree_each_time_fails_and_nothing_else_notices(tmp_path: Path, base: Path) -> None:
    place = POINTS.index("zero_grad.done")
    deadly = [f"{place},1,{tmp_path / f'death {number}'},tree" for number in range(MAX_SERVER_DEATHS)]
    with serving(tmp_path / "calm", base) as service:
        _, expected = _victim(service, "forward_backward", "forward_backward", "optim_step")
        expected_bystander = _bystander(service)
    with (
        serving(
            tmp_path / "deadly", base, "--death-limit", str(MAX_SERVER_DEATHS), fail_at=";".join(deadly)
        ) as service,
        ThreadPoolExecutor(1) as threads,
    ):
        bystander = threads.submit(_bystander, service)
        codes, saved = _victim(service, "forward_backward", "zero_grad", "forward_backward", "optim_step")
        assert codes == [None, "worker_died", None, None]
        assert saved == expected  # the gradient was not cleared: it failed, and changed nothing
        assert bystander.result(timeout=CLIENT_SECONDS) == expected_bystander
        assert service.starts == 1 + MAX_SERVER_DEATHS
    assert len(list(tmp_path.glob("death *"))) == MAX_SERVER_DEATHS
