"""`/metrics`: what is counted, who may look, and that labels are bounded. docs/metrics.md and the code agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.metrics.events import Events, route_of
from app.settings import Settings
from tests.app.conftest import MODEL, Edge, running
from tests.support.api import Api

METRICS = "http://localhost/metrics"
ROOT = Path(__file__).parents[2]

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scraped(client: httpx.AsyncClient) -> Values:
    answer = await client.get(METRICS)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}


def value(values: Values, name: str, **labels: str) -> float:
    return values[name, tuple(sorted(labels.items()))]


async def test_a_round_of_work_is_counted(api: Api) -> None:
    before = await scraped(api.client)
    assert value(before, "tinsmith_trained_tokens_total", base_model=MODEL) == 0
    model_id = await api.model()
    await api.train(model_id, steps=2)
    await api.do("save_weights", model_id=model_id, path="kept")
    session = await api.session()
    sampler = await api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    await api.do(
        "asample",
        sampling_session_id=sampler.json()["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        num_samples=1,
        sampling_params={"max_tokens": 4, "temperature": 1.0, "seed": 1},
    )
    after = await scraped(api.client)
    for name in ("accepted", "finished"):
        assert value(after, f"tinsmith_operations_{name}_total", base_model=MODEL, kind="forward_backward") == 2
        assert value(after, f"tinsmith_operations_{name}_total", base_model=MODEL, kind="optim_step") == 2
        assert value(after, f"tinsmith_operations_{name}_total", base_model=MODEL, kind="create_model") == 1
    for name in ("wait", "run"):
        assert value(after, f"tinsmith_operation_{name}_seconds_count", base_model=MODEL, kind="optim_step") == 2
    assert value(after, "tinsmith_operations_pending", base_model=MODEL) == 0
    assert value(after, "tinsmith_trained_tokens_total", base_model=MODEL) == 8
    assert value(after, "tinsmith_optimizer_steps_total", base_model=MODEL) == 2
    assert 0 < value(after, "tinsmith_sampled_tokens_total", base_model=MODEL) <= 4
    assert value(after, "tinsmith_prompt_tokens_total", base_model=MODEL, source="read") == 3
    assert value(after, "tinsmith_base_model_state", base_model=MODEL, state="ready") == 1
    assert value(after, "tinsmith_base_model_state", base_model=MODEL, state="failed") == 0
    assert value(after, "tinsmith_adapters", base_model=MODEL) == 1
    assert value(after, "tinsmith_checkpoint_bytes", kind="training") > 1000
    assert value(after, "tinsmith_http_requests_total", method="POST", route="/api/v1/optim_step", status="200") == 2
    assert value(after, "tinsmith_database_writes_total") > value(before, "tinsmith_database_writes_total")
    assert value(after, "tinsmith_database_commit_seconds_count") > 0
    assert value(after, "tinsmith_disk_free_bytes") > 0
    assert value(after, "process_resident_memory_bytes") > 0
    for labels in (dict(pairs) for _, pairs in after):
        for content in labels.values():
            assert model_id not in content
            assert session not in content


async def test_a_death_and_a_failure_are_counted(api: Api) -> None:
    model_id = await api.model()
    api.groups.made[0].die()
    await api.ready()
    await api.train(model_id)
    saved = await api.do("save_weights", model_id=model_id, path="a")
    small = await api.model(number=0, rank=2)
    failure = await api.fails("load_weights", model_id=small, path=saved["path"], optimizer=False)
    values = await scraped(api.client)
    assert value(values, "tinsmith_worker_restarts_total", base_model=MODEL) == 1
    assert value(values, "tinsmith_recoveries_total") >= 1
    assert failure["category"] == "user"
    failed = {key: number for key, number in values.items() if key[0] == "tinsmith_operations_failed_total"}
    assert [dict(labels)["kind"] for _, labels in failed] == ["load_weights"]
    assert list(failed.values()) == [1]


async def test_what_callers_make_up_becomes_no_label(edge: Edge) -> None:
    for number in range(5):
        await edge.client.get(f"made-up-{number}")
        await edge.client.request(f"MADE{number}", "sessions")
        await edge.client.get(f"training_runs/run-{number}")
    values = await scraped(edge.client)
    routes = {dict(labels)["route"] for name, labels in values if name == "tinsmith_http_requests_total"}
    methods = {dict(labels)["method"] for name, labels in values if name == "tinsmith_http_requests_total"}
    assert not [route for route in routes if re.search(r"\d", route.replace("/v1", ""))]
    assert {"other", "/api/v1/training_runs/{model_id}"} & routes
    assert not [method for method in methods if method.startswith("MADE")]
    assert value(values, "tinsmith_http_requests_total", method="GET", route="other", status="404") == 5


async def test_it_takes_the_operators_key(edge: Edge) -> None:
    other = await edge.other_project()
    assert (await other.get(METRICS)).status_code == 403
    async with edge.without_key() as stranger:
        assert (await stranger.get(METRICS)).status_code == 401
        key = edge.app.state.dev_key
        assert (await stranger.get(METRICS, headers={"Authorization": f"Bearer {key}"})).status_code == 200


async def test_or_none_if_the_settings_say_so(make_settings: Callable[..., Settings]) -> None:
    async with running(make_settings(metrics_public=True)) as edge, edge.without_key() as stranger:
        assert value(await scraped(stranger), "tinsmith_draining") == 0
        assert (await stranger.get("sessions")).status_code == 401, "nothing else is open"
        assert (await stranger.get("http://localhost/metrics/")).status_code == 401


def test_an_operation_that_began_twice_waited_once() -> None:
    now = [0.0]
    events = Events(clock=lambda: now[0])
    events.queued("a", "forward", "m")
    for moment in (2.0, 5.0):
        now[0] = moment
        events.started("a")
    now[0] = 9.0
    events.settled("a", "nan_loss")
    events.settled("a", None)

    def read(name: str, **labels: str) -> float | None:
        return events.registry.get_sample_value(name, {"base_model": "m", "kind": "forward", **labels})

    assert read("tinsmith_operation_wait_seconds_sum") == 2.0
    assert read("tinsmith_operation_run_seconds_sum") == 7.0
    assert read("tinsmith_operations_failed_total", code="nan_loss") == 1
    assert read("tinsmith_operations_finished_total") is None
    events.queued("b", "forward", "m")
    events.dropped("b")
    assert not events._watched
    assert route_of({"type": "http"}) == "other"
