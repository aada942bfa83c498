"""The official command line, as processes, and what tinker-cookbook does to download a checkpoint."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyrage
import pytest
import tinker
from safetensors.torch import load, load_file

from tests.e2e.conftest import MODEL
from tests.e2e.test_sdk import logprobs, step
from tests.support.server import RunningServer, environment
from tests.support.tinker_command import run_tinker

Cli = Callable[..., Any]


@pytest.fixture
def cli(server: RunningServer, tmp_path: Path) -> Cli:
    """Runs `tinker ARGUMENTS`; the JSON that it prints (None if nothing), or the text of its failure."""
    settings = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "HOME": str(tmp_path)}

    def run(*arguments: str, fails: bool = False) -> Any:
        done = run_tinker(["-f", "json", *arguments], environment(settings), tmp_path)
        assert (done.returncode != 0) == fails, (arguments, done.stdout, done.stderr)
        if fails:
            return done.stderr
        return json.loads(done.stdout) if done.stdout.strip().startswith(("{", "[")) else None

    return run


@pytest.fixture
def client(service: Any) -> Any:
    """A trained client of rank 4."""
    trained = service.create_lora_training_client(
        base_model=MODEL, rank=4, seed=1, user_metadata={"renderer_name": "plain"}
    ).result()
    step(trained)
    return trained


def test_runs_and_checkpoints_are_listed_and_shown(cli: Cli, client: Any) -> None:
    run_id = client.model_id
    path = client.save_state("first", user_metadata={"step": "1"}).result().path
    sampler = client.save_weights_for_sampler("second").result().path
    assert run_id in [run["training_run_id"] for run in cli("run", "list", "--limit", "0")["runs"]]
    shown = cli("run", "info", run_id)
    assert (shown["training_run_id"], shown["base_model"], shown["lora_rank"]) == (run_id, MODEL, 4)
    assert shown["user_metadata"] == {"renderer_name": "plain"}
    kinds = {each["tinker_path"]: each["checkpoint_type"] for each in cli("checkpoint", "list")["checkpoints"]}
    assert (kinds[path], kinds[sampler]) == ("training", "sampler")
    assert cli("checkpoint", "info", path)["tinker_path"] == path
    assert "404" in cli("run", "info", "no-such-run", fails=True)


def test_a_checkpoint_is_published_given_a_time_and_deleted(cli: Cli, client: Any, server: RunningServer) -> None:
    path = client.save_state("first").result().path

    def shown() -> Any:
        with server.client() as http:
            return http.get(f"training_runs/{client.model_id}/checkpoints").json()["checkpoints"]

    cli("checkpoint", "publish", path)
    assert shown()[0]["public"] is True
    cli("checkpoint", "unpublish", path)
    assert shown()[0]["public"] is False
    cli("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert shown()[0]["expires_at"]
    cli("checkpoint", "set-ttl", path, "--remove")
    assert "expires_at" not in shown()[0]
    cli("checkpoint", "delete", "--yes", path)
    assert shown() == []


def test_exports_and_training_checkpoints_are_downloaded(
    cli: Cli, client: Any, server: RunningServer, tmp_path: Path
) -> None:
    export = client.save_weights_external("out").result().path
    state = client.save_state("state").result().path
    tensors = []
    for path in (export, state):
        cli("checkpoint", "download", path, "--output", str(tmp_path / "got"))
        folder = tmp_path / "got" / path.removeprefix("tinker://").replace("/", "_")
        assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
        tensors.append(load_file(folder / "adapter_model.safetensors"))
    assert tensors[0].keys() == tensors[1].keys()
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])
    with server.client() as http:
        listed = http.get("checkpoints").json()["checkpoints"]
    assert [each["tinker_path"] for each in listed if each["checkpoint_type"] == "external"] == [export]


def test_the_cookbooks_way_to_download_with_an_age_key(service: Any, client: Any, server: RunningServer) -> None:
    state = client.save_state("state").result().path
    identity = pyrage.x25519.Identity.generate()
    recipient = str(identity.to_public())
    loader = service.create_training_client_from_state(state).result()
    path = (
        loader.save_weights_external("download", ttl_seconds=3600, age_encryption_recipients=[recipient]).result().path
    )
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    answer = rest.get_external_weights_urls(path).result()
    assert set(answer.urls) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    files = {}
    for name, url in answer.urls.items():
        with urllib.request.urlopen(url, timeout=30) as response:
            files[name] = pyrage.decrypt(response.read(), [identity])
    assert json.loads(files["adapter_config.json.age"])["base_model_name_or_path"] == MODEL
    assert len(load(files["adapter_model.safetensors.age"])) > 0
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_external_weights_urls(path).result()


def test_a_copy_is_loaded_after_its_source_is_gone(service: Any, client: Any, server: RunningServer) -> None:
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    path = client.save_state("state").result().path
    project = rest.get_training_run(client.model_id).result().model_owner
    copied = rest.copy_weights(path, project, ttl_seconds=3600).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    loaded = service.create_training_client_from_state_with_optimizer(copied).result()
    assert logprobs(loaded) == logprobs(client)
    run = rest.get_training_run_by_tinker_path(copied).result()
    assert run.user_metadata == {"renderer_name": "plain"}
