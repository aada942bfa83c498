"""The official `tinker` command against a real server: identity, traces, usage."""

from __future__ import annotations

import csv
import io
import json
import stat
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.e2e.conftest import MODEL
from tests.e2e.test_sdk import ADAM, DATA
from tests.support.server import RunningServer, environment, serve
from tests.support.tinker_command import run_tinker


@pytest.fixture(scope="module")
def identified(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[RunningServer]:
    """A server that exchanges keys for tokens."""
    data_dir = tmp_path_factory.mktemp("identified") / "data"
    arguments = ["--base-model", f"{MODEL}={tiny_folder}", "--threads", "1", "--shutdown-grace", "2"]
    arguments += ["--log-requests", "true"]
    with serve(data_dir, [*arguments, "--pjwt-auth-enabled", "true"]) as running:
        yield running


@pytest.fixture(scope="module")
def worked(identified: RunningServer) -> str:
    """A session in which one step was trained, a checkpoint saved and a few tokens drawn; its id."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tinker.ServiceClient(
            base_url=identified.url, api_key=identified.key, user_metadata={"purpose": "cli"}
        ) as service,
    ):
        patch.setenv("TINKER_TELEMETRY", "0")
        client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(ADAM).result()
        client.save_state("one").result()
        sampler = client.save_weights_and_get_sampling_client().result()
        sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), 1, tinker.SamplingParams(max_tokens=3, stop=[])).result()
        return str(client.get_info().model_id).split(":")[0]


def run(server: RunningServer, *arguments: str, home: Path, key: str | None = None, stdin: str = "") -> Any:
    """Run `tinker ...` as a user would, in an empty home."""
    extra = {"TINKER_BASE_URL": server.url, "HOME": str(home)}
    if key != "":
        extra["TINKER_API_KEY"] = key or server.key
    return run_tinker(arguments, environment(extra), home, stdin=stdin)


def succeeds(server: RunningServer, *arguments: str, home: Path, **more: Any) -> str:
    done = run(server, *arguments, home=home, **more)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def window() -> tuple[str, str]:
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    return (end - timedelta(hours=3)).isoformat(), end.isoformat()


def test_status_and_whoami(identified: RunningServer, tmp_path: Path) -> None:
    assert "Tinker accessible: yes" in succeeds(identified, "auth", "status", home=tmp_path)
    shown = json.loads(succeeds(identified, "-f", "json", "auth", "whoami", home=tmp_path))
    project_id = shown["user_urn"].removeprefix("tml:user:")
    assert shown == {"user_urn": f"tml:user:{project_id}", "org_urn": f"tml:organization:{project_id}", "email": None}


def test_login_checks_the_key_and_stores_it(identified: RunningServer, tmp_path: Path) -> None:
    refused = run(identified, "auth", "login", home=tmp_path, key="", stdin="tml-wrong\n")
    assert refused.returncode == 1
    assert "a valid API key is required" in refused.stderr
    assert not (tmp_path / ".tinker").exists() or "tml-wrong" not in str(list((tmp_path / ".tinker").iterdir()))
    done = succeeds(identified, "auth", "login", home=tmp_path, key="", stdin=f"{identified.key}\n")
    assert "(default)" in done
    assert "'dev'" in done
    assert "still active" in succeeds(identified, "auth", "logout", home=tmp_path, key="")


def test_a_trace_is_downloaded(identified: RunningServer, worked: str, tmp_path: Path) -> None:
    succeeds(identified, "session", "export-trace", worked, "-o", "out.json", home=tmp_path)
    trace = json.loads((tmp_path / "out.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"queued", "run", "delivery"} <= names
    assert {"create_model #0", "forward_backward #1", "optim_step #2", "save_weights #3"} <= names
    url = succeeds(identified, "session", "export-trace", worked, "--url-only", home=tmp_path).strip()
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert json.load(answer)["otherData"]["session_id"] == worked


def test_usage(identified: RunningServer, worked: str, tmp_path: Path) -> None:
    answer = json.loads(succeeds(identified, "-f", "json", "billing", "usage", *window(), home=tmp_path))
    counts = {row["event_info"]["type"]: row["event_info"] for row in answer["data"]}
    assert counts["training"]["token_count"] == sum(datum.model_input.length for datum in DATA)
    assert (counts["sampling_prefill"]["token_count"], counts["sampling_prefill"]["cached"]) == (3, False)
    assert counts["sampling_sample"]["token_count"] == 3
    assert counts["checkpoint"]["count"] == 2
    assert counts["storage"]["gigabyte_hours"] > 0
    assert answer["sessions"] == {worked: {"user_metadata": {"purpose": "cli"}}}
    rows = list(
        csv.DictReader(io.StringIO(succeeds(identified, "billing", "usage", *window(), "--csv", "-", home=tmp_path)))
    )
    assert {row["type"] for row in rows} == set(counts)
    refused = run(identified, "billing", "usage", "2026-07-13T00:30:00Z", "2026-07-13T01:00:00Z", home=tmp_path)
    assert refused.returncode == 1
    assert "beginning of a UTC hour" in refused.stderr


def test_checkpoint_storage(identified: RunningServer, worked: str, tmp_path: Path) -> None:
    answer = json.loads(succeeds(identified, "-f", "json", "billing", "checkpoint-storage", home=tmp_path))
    [item] = answer["data"]
    assert item["checkpoint_count"] >= 1
    assert item["size_bytes"] > 0
    assert item["size_gigabytes"] == item["size_bytes"] / 1e9
    assert run(identified, "billing", "checkpoint-storage", "--project-id", "other", home=tmp_path).returncode == 1


def test_the_sdk_reads_audit_search_and_identity(
    identified: RunningServer, worked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    admin = tinker.AdminClient(base_url=identified.url, api_key=identified.key)
    entries = admin.get_audit_log("checkpoints").result().entries
    assert [entry.event for entry in entries][:1] == ["checkpoint_created"]
    assert entries[0].tinker_path == f"tinker://{worked}:train:0/weights/one"
    assert admin.get_audit_log("all", day=datetime(2020, 1, 1).date()).result().entries == []
    service = tinker.ServiceClient(base_url=identified.url, api_key=identified.key)
    rest = service.create_rest_client()
    identity = rest.whoami().result()
    page = rest.search_sessions(tinker.types.SessionSearchRequest(user_metadata={"purpose": "cli"})).result()
    [found] = page.sessions
    assert (found.session_id, found.owner) == (worked, identity.user_urn)
    assert found.status.reason.type == "success"
    assert found.checkpoints_count == 1
    rest.assign_session_project(worked, found.project_id).result()
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project(worked, "other").result()


def test_nothing_of_the_server_names_a_credential(identified: RunningServer, worked: str) -> None:
    secret = identified.data_dir / "token_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    log = identified.log.read_text()
    assert "/auth/token" in log
    assert log.count(identified.key) == 1  # the ready line tells it to who started the server
    assert "eyJ" not in log
    assert "signature=" not in log
