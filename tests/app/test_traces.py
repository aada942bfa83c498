"""The trace of a session: slices that nest, one track group for each run and sampler, behind a signed address."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.services import traces
from app.services.traces import trace_of
from app.settings import Settings
from store.records import OperationState, TimelineRecord
from tests.app.conftest import MODEL, Edge, running
from tests.support.api import DATA, Api

NOW = datetime(2026, 7, 13, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def record(
    request_id: str,
    created: float,
    started: float | None = None,
    finished: float | None = None,
    delivered: float | None = None,
    *,
    scope: str = "model:s:train:0",
    kind: str = "forward",
    seq_id: int | None = 1,
    state: OperationState = "done",
    error_code: str | None = None,
) -> TimelineRecord:
    """An operation with its times in seconds after noon."""

    def at(seconds: float | None) -> datetime | None:
        return None if seconds is None else NOW + seconds * SECOND

    return TimelineRecord(
        request_id=request_id,
        kind=kind,
        scope=scope,
        seq_id=seq_id,
        state=state,
        error_code=error_code,
        created_at=NOW + created * SECOND,
        started_at=at(started),
        finished_at=at(finished),
        delivered_at=at(delivered),
    )


def check(trace: dict[str, Any]) -> None:
    """What a viewer needs: integer times, named tracks, and slices of one track that nest or are apart."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert event["pid"] in named
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            lanes[(event["pid"], event["tid"])].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        open_until: list[int] = []
        for begin, end in slices:  # as they are written: an outer slice comes before what it holds
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "two slices of one track cross"
            open_until.append(end)


def slices(trace: dict[str, Any], request_id: str) -> dict[str, tuple[float, float]]:
    """Name -> (begin, end) in seconds after noon of the slices of one operation."""
    noon = NOW.timestamp()
    return {
        event["name"]: (event["ts"] / 1e6 - noon, (event["ts"] + event["dur"]) / 1e6 - noon)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["args"]["request_id"] == request_id
    }


def test_the_phases_of_an_operation() -> None:
    trace = trace_of("s", [record("a", 0, 2, 5, 6)], NOW + 60 * SECOND)
    check(trace)
    assert slices(trace, "a") == {"forward #1": (0, 6), "queued": (0, 2), "run": (2, 5), "delivery": (5, 6)}


@pytest.mark.parametrize(
    ("times", "state", "expected"),
    [
        ((0, None, None, None), "pending", {"forward #1": (0, 60), "queued": (0, 60)}),
        ((0, 2, None, None), "pending", {"forward #1": (0, 60), "queued": (0, 2), "run": (2, 60)}),
        ((0, 2, 5, None), "done", {"forward #1": (0, 5), "queued": (0, 2), "run": (2, 5)}),
        ((0, None, 5, 6), "failed", {"forward #1": (0, 6), "queued": (0, 5), "delivery": (5, 6)}),
        ((0, 2, 5, 6), "expired", {"forward #1": (0, 6), "queued": (0, 2), "run": (2, 5), "delivery": (5, 6)}),
    ],
)
def test_an_operation_in_every_state(
    times: tuple[float | None, ...], state: OperationState, expected: dict[str, tuple[float, float]]
) -> None:
    trace = trace_of("s", [record("a", *times, state=state)], NOW + 60 * SECOND)  # type: ignore[arg-type]
    check(trace)
    assert slices(trace, "a") == expected


def test_a_clock_that_was_set_back_makes_no_slices_that_cross() -> None:
    for times in ((5, 3, 4, 1), (5, 9, 7, 6), (5, None, 1, None), (5, 4, None, None)):
        check(trace_of("s", [record("a", *times, state="pending" if times[2] is None else "done")], NOW))


def test_operations_that_overlap_lie_beside_each_other() -> None:
    records = [record(f"r{n}", n / 10, 1 + n, 2 + n, 2.5 + n, seq_id=n) for n in range(8)]
    records += [record("late", 30, 31, 32, 33, seq_id=9)]
    trace = trace_of("s", records, NOW)
    check(trace)
    lane = {e["args"]["request_id"]: e["tid"] for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "phase"}
    assert len(set(lane.values()) - {lane["late"]}) == 7
    assert lane["late"] == 1  # the first lane is free again


def test_every_run_and_sampler_has_a_track_of_its_own() -> None:
    records = [
        record("c", 0, 0, 1, 1, scope="session:s:train", kind="create_model", seq_id=0),
        record("a", 2, 2, 3, 3, scope="model:s:train:0"),
        record("b", 2, 2, 3, 3, scope="model:s:train:1"),
        record("x", 2, 2, 3, 3, scope="sampler:s:sample:0", kind="sample", state="failed", error_code="gone"),
    ]
    trace = trace_of("s", records, NOW)
    check(trace)
    track = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    of = {e["args"]["request_id"]: track[e["pid"]] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert of == {"c": "s:train:0", "a": "s:train:0", "b": "s:train:1", "x": "s:sample:0"}
    [failed] = [e for e in trace["traceEvents"] if e["name"] == "sample #1"]
    assert failed["args"] == {"request_id": "x", "seq_id": 1, "state": "failed", "error": "gone"}
    assert trace_of("s", [], NOW)["traceEvents"] == []


async def exported(client: Any, session_id: str) -> str:
    answer = await client.get(f"sessions/{session_id}/trace_export")
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"status", "url"}
    assert answer.json()["status"] == "ready"
    return str(answer.json()["url"])


async def test_the_trace_of_real_work(api: Api) -> None:
    session_id, began = await api.session(), datetime.now(UTC)
    models = [await api.model(session_id, number) for number in range(2)]
    ids: dict[str, str] = {}
    for model_id in models:
        ids[model_id] = await api.submit("forward_backward", model_id=model_id, data=DATA, loss_fn="cross_entropy")
        await api.result(ids[model_id])
    opened = await api.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=MODEL
    )
    sampler = str(opened.json()["sampling_session_id"])
    ids[sampler] = await api.submit(
        "asample", sampling_session_id=sampler, seq_id=0, prompt=[5, 6], sampling_params={"max_tokens": 2}
    )
    await api.result(ids[sampler])
    await api.model()  # of another session
    async with api.edge.without_key() as client:
        answer = await client.get(await exported(api.client, session_id))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)
    trace, ended = answer.json(), datetime.now(UTC)
    check(trace)
    tracks = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert sorted(tracks.values()) == sorted([*models, sampler])
    for name, request_id in ids.items():
        own = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["request_id"] == request_id]
        assert {tracks[event["pid"]] for event in own} == {name}
        assert [event["name"] for event in own[1:]] == ["queued", "run", "delivery"]
        whole = own[0]
        assert began.timestamp() * 1e6 <= whole["ts"] <= whole["ts"] + whole["dur"] <= ended.timestamp() * 1e6
        assert own[2]["dur"] > 0


async def test_only_the_owner_gets_an_address(edge: Edge) -> None:
    session_id = await edge.new_session()
    await exported(edge.client, session_id)
    stranger = await edge.other_project()
    nobody = await edge.client.get(f"sessions/{'0' * len(session_id)}/trace_export")
    theirs = await stranger.get(f"sessions/{session_id}/trace_export")
    assert (nobody.status_code, theirs.status_code) == (404, 404)
    assert theirs.json()["detail"] == nobody.json()["detail"].replace("0" * len(session_id), session_id)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda url, other: url.replace("expires=", "expires=9"),
        lambda url, other: url[:-4] + "0000",
        lambda url, other: url.replace(url.split("/sessions/")[1].split("/")[0], other),
        lambda url, other: url.split("?")[0],
        lambda url, other: url.replace("signature=", "signature=%ff"),
    ],
)
async def test_an_altered_address_is_no_address(edge: Edge, tamper: Callable[[str, str], str]) -> None:
    session_id, other = await edge.new_session(), await edge.new_session()
    url = await exported(edge.client, session_id)
    async with edge.without_key() as client:
        assert (await client.get(url)).status_code == 200
        assert (await client.get(tamper(url, other))).status_code in (400, 404)


async def test_an_address_ends(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    url = await exported(edge.client, await edge.new_session())
    signed = edge.app.state.services.exports._signed
    later = datetime.now(UTC) + timedelta(minutes=61)
    monkeypatch.setattr(signed, "_clock", lambda: later)
    async with edge.without_key() as client:
        assert (await client.get(url)).status_code == 404


async def test_a_session_that_is_too_long_fails_in_words(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = await api.session()
    await api.model(session_id)
    url = await exported(api.client, session_id)
    monkeypatch.setattr(traces, "MAX_OPERATIONS", 0)
    answer = (await api.client.get(f"sessions/{session_id}/trace_export")).json()
    assert answer["status"] == "failed"
    assert "1 operations" in answer["error"]
    async with api.edge.without_key() as client:
        assert (await client.get(url)).status_code == 413


async def test_an_empty_session_has_an_empty_trace(edge: Edge) -> None:
    session_id = await edge.new_session()
    url = await exported(edge.client, session_id)
    assert urlsplit(url).path == f"/api/v1/files/sessions/{session_id}/trace.json"
    trace = (await edge.without_key().get(url)).json()
    assert trace["traceEvents"] == []
    assert trace["otherData"]["session_id"] == session_id


async def test_addresses_begin_with_the_public_one(make_settings: Callable[..., Settings]) -> None:
    """Behind a proxy the server is asked under another name than its clients know."""
    async with running(make_settings(public_url="https://train.example/api-of-ours/")) as edge:
        session_id = await edge.new_session()
        url = await exported(edge.client, session_id)
        assert url.startswith(f"https://train.example/api-of-ours/api/v1/files/sessions/{session_id}/trace.json?")
        # The signature is of what comes behind it: the proxy takes its own part away.
        behind = "http://localhost" + url.removeprefix("https://train.example/api-of-ours")
        async with edge.without_key() as nobody:
            assert (await nobody.get(behind)).is_success
