"""`tinsmith` against a real server: everything that a user does by hand, and what goes wrong at first."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from app import cli
from app.commands.output import FAILED, NOT_ALLOWED, UNREACHABLE, USAGE
from tests.e2e.conftest import MODEL
from tests.e2e.test_sdk import logprobs, step
from tests.support.server import RunningServer, free_port

Run = Callable[..., Result]
EVIL = "\x1b[31mred\x1b]0;title\x07"


@pytest.fixture
def run(server: RunningServer) -> Run:
    """Runs a command line; `code` is how it must end."""

    def run(*arguments: str, code: int = 0, **options: Any) -> Result:
        environment = {"TINSMITH_URL": server.url, "TINSMITH_KEY": server.key, **options.pop("env", {})}
        done = CliRunner().invoke(cli.app, list(map(str, arguments)), env=environment, **options)
        assert done.exit_code == code, (arguments, done.output, done.exception)
        assert "Traceback" not in done.output
        assert "\x1b" not in done.output
        return done

    return run


def data(done: Result) -> Any:
    """What a command wrote with --json."""
    document = json.loads(done.stdout)
    assert document.keys() == {"kind", "data"}
    return document["data"]


@pytest.fixture(scope="module")
def saved(server: RunningServer) -> Any:
    """A trained client with hostile metadata, and a checkpoint of it."""
    import tinker

    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as service:
        client = service.create_lora_training_client(
            base_model=MODEL, rank=4, seed=1, user_metadata={"evil": EVIL}
        ).result()
        step(client)
        path = client.save_state("first", user_metadata={"note": EVIL}).result().path
        yield service, client, path


def test_what_there_is_is_shown(run: Run, saved: Any, server: RunningServer) -> None:
    _, client, path = saved
    shown = run("status").stdout
    assert server.url in shown
    assert MODEL in shown
    status = data(run("status", "--json"))
    assert (status["ready"], status["version"], status["engine"]) == (True, "0.1.0", "torch")
    assert status["models"][0]["state"] == "ready"
    assert client.model_id in run("runs", "list").stdout
    assert client.model_id in [each["training_run_id"] for each in data(run("runs", "list", "--json"))["runs"]]
    assert "evil=\\x1b[31mred\\x1b]0;title\\x07" in run("runs", "show", client.model_id).stdout
    assert path in run("checkpoints", "list", "--run", client.model_id).stdout
    about = data(run("checkpoints", "show", path, "--json"))
    assert (about["base_model"], about["lora_rank"], about["train_mlp"]) == (MODEL, 4, True)
    assert [each["name"] for each in about["files"]] == ["adapter_config.json", "adapter_model.safetensors"]
    assert "note=\\x1b[31m" in run("checkpoints", "show", path).stdout
    assert MODEL in run("models", "list").stdout
    used = data(run("usage", "--days", "2", "--json"))
    assert sum(day["training"] for day in used["days"]) > 0


def test_a_run_is_watched_and_what_waits_is_told(run: Run, saved: Any) -> None:
    _, client, _ = saved
    heads, first, *_ = run("runs", "watch", client.model_id, "--once").stdout.splitlines()
    assert heads.split()[0] == "step"
    points = data(run("runs", "watch", client.model_id, "--json"))["points"]
    assert first.split()[0] == str(points[0]["step"]) == "1"
    assert points[0]["grad_norm"] > 0
    assert points[0]["loss_per_token"] > 0
    assert data(run("status", "--json"))["queue"]["total"] == 0
    assert "0 of your requests wait" in run("status").stdout


def test_an_adapter_goes_out_and_comes_in_with_the_same_numbers(run: Run, saved: Any, tmp_path: Path) -> None:
    service, client, path = saved
    folder = tmp_path / "mine"
    run("checkpoints", "download", path, "--output", folder)
    run("checkpoints", "download", path, "--output", folder)  # nothing is left to do
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    back = data(run("checkpoints", "import", folder, "--json"))["tinker_path"]
    assert back.endswith("/weights/mine")
    loaded = service.create_training_client_from_state(back).result()
    assert logprobs(loaded) == logprobs(client)
    exported = run("checkpoints", "export", path, "--output", tmp_path / "peft").stdout
    assert "adapter_model.safetensors" in exported
    twice = run("checkpoints", "export", path, "--output", tmp_path / "peft", code=FAILED)
    assert "--output" in twice.stderr
    unknown = run("checkpoints", "export", path, "--output", tmp_path / "m", "--format", "merged", code=FAILED)
    assert "--base" in unknown.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine", "peft"]
    for wrong in (tmp_path, tmp_path / "absent"):
        assert "save_pretrained" in run("checkpoints", "import", wrong, code=FAILED).stderr


@pytest.mark.slow
def test_a_whole_model_is_exported_by_a_process_of_its_own(
    run: Run, saved: Any, tmp_path: Path, tiny_folder: Path
) -> None:
    _, _, path = saved
    options = ["--output", tmp_path / "g", "--format", "gguf", "--base", tiny_folder]
    made = data(run("checkpoints", "export", path, *options, "--json", env={"OMP_NUM_THREADS": "1"}))
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(made["files"])
    assert set(made["files"]) == {each.name for each in (tmp_path / "g").iterdir()}
    assert {str(each.dtype) for each in load_file(tmp_path / "g" / "model.safetensors").values()} == {"torch.float16"}
    assert [each.name for each in tmp_path.iterdir()] == ["g"]


def test_checkpoints_are_published_and_deleted_only_after_a_yes(run: Run, saved: Any) -> None:
    _, client, _ = saved
    path = client.save_state("gone").result().path

    def public() -> bool:
        return bool(data(run("checkpoints", "show", path, "--json"))["public"])

    run("checkpoints", "publish", path)
    assert public()
    run("checkpoints", "unpublish", path)
    assert not public()
    assert "--yes" in run("checkpoints", "delete", path, code=USAGE).stderr
    assert not public()
    run("checkpoints", "delete", "--yes", path)
    assert "checkpoints list" in run("checkpoints", "show", path, code=FAILED).stderr
    for wrong in ("first", "tinker://x/y", "tinker://x/weights/", f"{path}/more"):
        assert "tinker://" in run("checkpoints", "show", wrong, code=USAGE).stderr


def test_texts_are_completed_and_answered(run: Run, saved: Any) -> None:
    _, client, _ = saved
    sampler = client.save_weights_for_sampler("talk").result().path
    options = ["--max-tokens", "6", "--seed", "1"]
    plain = data(run("sample", "The", *options, "--json"))
    assert (plain["model"], plain["finish_reason"]) == (MODEL, "length")
    assert run("sample", "-", *options, input="The").stdout.rstrip("\n") == _shown(plain["text"])
    assert data(run("sample", "The", *options, "--model", sampler, "--json"))["text"] != plain["text"]
    answer = data(run("chat", "hello", "--system", "Be brief.", *options, "--json"))
    assert answer["text"]
    spoken = run("chat", *options, input="hello\nagain\n\n").stdout
    assert spoken.count("\n") >= 2
    wrong = run("sample", "x", "--model", "nobody/nothing", code=FAILED).stderr.splitlines()
    assert "nobody/nothing" in wrong[0]
    assert "tinsmith status" in wrong[1]
    assert "empty" in run("sample", "-", code=FAILED, input="").stderr
    assert run("chat", "--json", code=USAGE)
    cause, remedy = run("sample", "x", "--max-tokens", "100000", code=FAILED).stderr.splitlines()
    assert "context" in cause
    assert remedy.startswith("help: at most ")


def _shown(text: str) -> str:
    from app.commands.output import prose

    return prose(text).rstrip("\n")


def test_what_goes_wrong_at_first_is_told_in_two_lines(run: Run, server: RunningServer) -> None:
    run("runs", "list", "--url", f"{server.url}/api/v1")  # as it stands in other programs' settings
    port = server.url.rpartition(":")[2]
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=_greets, args=(other,), daemon=True)
        thread.start()
        cases = (
            (["--url", f"http://127.0.0.1:{free_port()}"], UNREACHABLE, "no server answers", "tinsmith serve"),
            (["--url", f"https://127.0.0.1:{port}"], UNREACHABLE, "does not speak https", f"http://127.0.0.1:{port}"),
            (["--url", f"http://127.0.0.1:{other.getsockname()[1]}"], UNREACHABLE, "not speak http", "https://"),
            (["--url", "localhost:8410"], USAGE, "localhost:8410", "http://127.0.0.1:8410"),
            (["--api-key", "tml-wrong"], NOT_ALLOWED, "does not know this API key", "--api-key"),
        )
        for arguments, code, cause, remedy in cases:
            done = run("runs", "list", *arguments, code=code)
            first, second = done.stderr.splitlines()
            assert cause in first, (arguments, first)
            assert remedy in second, (arguments, second)
            assert done.stdout == ""
    assert "RUN" in run("runs", "show", code=USAGE).stderr.upper()
    unknown = run("runs", "show", "nobody:train:0", code=FAILED).stderr
    assert unknown.splitlines() == [
        "error: there is no training run 'nobody:train:0'",
        "help: `tinsmith runs list` shows the training runs of your project",
    ]


def _greets(other: socket.socket) -> None:
    """A server of another protocol: it speaks first."""
    connection, _ = other.accept()
    with connection:
        connection.recv(1024)
        connection.sendall(b"220 ready for mail\r\n\r\n")


def test_the_log_is_shown_if_there_is_one(run: Run, tmp_path: Path) -> None:
    missing = run("logs", "--data-dir", tmp_path, code=FAILED)
    assert "docker compose logs" in missing.stderr
    (tmp_path / "server.log").write_text("one\ntwo\x1b[2J\nthree\n")
    assert run("logs", "--data-dir", tmp_path, "-n", "2").stdout.splitlines() == ["two\\x1b[2J", "three"]
    assert run("logs", "--data-dir", tmp_path, "-n", "0").stdout == ""
