"""What commands say about wrong input: for each, one line with the cause and one with what to do, and the exit code."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app import cli
from app.commands import output
from app.commands.output import FAILED, NOT_ALLOWED, STOPPED, UNREACHABLE, USAGE
from app.commands.usage import MOST_DAYS, window_of
from app.settings import Settings
from tests.support.idle_server import IdleServer, listening
from tests.support.server import free_port

RUN = "tinker://nope:train:0/weights/x"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleServer]:
    data_dir = tmp_path_factory.mktemp("errors") / "data"
    settings = Settings(data_dir=data_dir, base_model=["acme/tiny=/nowhere"], shutdown_grace=1.0)
    with listening(settings) as running:
        yield running


def run(line: str, server: IdleServer | None = None, **options: str) -> Result:
    """One command, with the server's address and key in its environment if there is one."""
    environment = {} if server is None else {"TINSMITH_URL": server.url, "TINSMITH_KEY": server.key}
    return CliRunner().invoke(cli.app, shlex.split(line), env=environment | options)


def told(done: Result, code: int) -> tuple[str, str]:
    """The cause and the remedy that a command ended with, which are all that it said."""
    assert done.exit_code == code, (done.output, done.exception)
    assert done.stdout == ""
    cause, remedy = done.stderr.splitlines()
    assert cause.startswith("error: "), done.stderr
    assert remedy.startswith("help: "), done.stderr
    return cause.removeprefix("error: "), remedy.removeprefix("help: ")


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        ("nope", "there is no command 'nope'", "`tinsmith --help` lists the commands"),
        ("statsu", "there is no command 'statsu'", "did you mean `tinsmith status`?"),
        ("runs lst", "there is no command 'lst'", "did you mean `tinsmith runs list`?"),
        ("--nope", "`tinsmith` has no option --nope", "`tinsmith --help`"),
        ("keys --foo", "`tinsmith keys` has no option --foo", "`tinsmith keys --help`"),
        ("runs list --lmit 3", "`tinsmith runs list` has no option --lmit", "did you mean --limit?"),
        ("runs list -x", "`tinsmith runs list` has no option -x", "`tinsmith runs list --help`"),
        ("runs list --limit", "--limit needs a value", "`tinsmith runs list --help`"),
        ("runs list --json=3", "--json takes no value", "`tinsmith runs list --help`"),
        ("runs list --limit x", "--limit cannot be 'x'", "give a whole number from 1 to 1000"),
        ("runs list --limit 0", "--limit cannot be '0'", "give a whole number from 1 to 1000"),
        ("usage --days 90", "--days cannot be '90'", "give a whole number from 1 to 14"),
        ("demo --steps 0", "--steps cannot be '0'", "give a whole number, 1 or more"),
        ("sample x --top-p 2", "--top-p cannot be '2'", "give a number from 0 to 1"),
        ("sample x --temperature inf", "--temperature: inf is not", "give a number, 0 or more"),
        ("sample x --temperature nan", "--temperature cannot be 'nan'", "give a number, 0 or more"),
        ("chat --temperature 1e999", "--temperature: inf is not", "give a number, 0 or more"),
        ("demo --learning-rate inf", "--learning-rate: inf is not", "give a number, 0 or more"),
        ("runs show", "the argument RUN is missing", "write `tinsmith runs show RUN [OPTIONS]`"),
        ("sample", "the argument PROMPT is missing", "write `tinsmith sample PROMPT [OPTIONS]`"),
        ("runs show a b", "there is nothing that 'b' could be", "write `tinsmith runs show RUN [OPTIONS]`"),
        ("version x", "there is nothing that 'x' could be", "write `tinsmith version [OPTIONS]`"),
        (f"checkpoints export {RUN} --output o --format zip", "--format", "give one of peft, merged, gguf"),
        ("checkpoints show nope", "'nope' is not the path of a checkpoint", "`tinsmith checkpoints list`"),
        ("keys rotate k --overlap 3y --api-key tml-x", "'3y' is no length of time", "90s, 15m, 12h, 30d"),
        ("runs show ''", "'' cannot be a training run", "`tinsmith runs list`"),
        ("runs show ..", "'..' cannot be a training run", "`tinsmith runs list`"),
        ("runs watch . --api-key tml-x", "'.' cannot be a training run", "`tinsmith runs list`"),
        ("checkpoints list --run ''", "'' cannot be a training run", "`tinsmith runs list`"),
        (
            "checkpoints delete -y tinker://../weights/x",
            "is not the path of a checkpoint",
            "`tinsmith checkpoints list`",
        ),
        ("keys revoke ''", "'' cannot be a key", "`tinsmith keys list`"),
        ("keys rotate ..", "'..' cannot be a key", "`tinsmith keys list`"),
        ("limits show --key '' --api-key tml-x", "'' cannot be a key", "`tinsmith keys list`"),
        ("limits clear --key .. --api-key tml-x", "'..' cannot be a key", "`tinsmith keys list`"),
        ("models remove ''", "'' cannot be a base model", "`tinsmith models list`"),
        ("models remove acme/../..", "'acme/../..' cannot be a base model", "`tinsmith models list`"),
        ("limits set x --api-key tml-x", "'x' is not NAME=VALUE", "lora_rank=16"),
        ("limits set lora_rank=Infinity --project p", "'Infinity' is not a value for lora_rank", "give a number"),
        ("limits set lora_rank=-Infinity --project p", "'-Infinity' is not a value for lora_rank", "give a number"),
        ("limits set lora_rank=NaN --project p", "'NaN' is not a value for lora_rank", "give a number"),
        ("limits set lora_rank=1e999 --project p", "'1e999' is not a value for lora_rank", "give a number"),
        ("limits clear x --api-key tml-x", "'x' is not a limit", "lora_rank"),
        ("serve --prot 3", "`tinsmith serve` has no option --prot", "did you mean --host or --port?"),
        ("serve --port 99999", "port = '99999' (command line)", "`tinsmith serve --help`"),
        ("serve --log-level loud", "log_level = 'loud' (command line)", "`tinsmith serve --help`"),
        ("serve --config /nowhere", "config file /nowhere", "--config"),
        ("serve --base-model a/b=/nowhere", "there is no folder '/nowhere'", "config.json"),
        ("doctor --port x", "port = 'x' (command line)", "`tinsmith serve --help`"),
    ],
)
def test_a_command_line_that_cannot_be_used(line: str, cause: str, remedy: str) -> None:
    first, second = told(run(line), USAGE)
    assert cause in first
    assert remedy in second


def test_several_wrong_settings_have_a_line_each() -> None:
    done = run("serve --port 80000 --threads x")
    assert done.exit_code == USAGE
    assert [line.split(" = ")[0] for line in done.stderr.splitlines()[:-1]] == ["error: port", "error: threads"]


def test_a_group_alone_shows_what_it_has() -> None:
    done = run("runs")
    assert done.exit_code == USAGE
    assert "error" not in done.output
    assert "watch" in done.output


RUNS, CHECKPOINTS = "`tinsmith runs list`", "`tinsmith checkpoints list`"


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        ("runs show nope", "there is no training run 'nope'", RUNS),
        ("runs watch nope:train:0", "there is no training run 'nope:train:0'", RUNS),
        ("checkpoints list --run nope", "there is no training run 'nope'", RUNS),
        (f"checkpoints show {RUN}", "there is no training run 'nope:train:0'", RUNS),
        (f"checkpoints download {RUN}", "there is no checkpoint", CHECKPOINTS),
        (f"checkpoints export {RUN} --output o", "there is no training run", RUNS),
        (f"checkpoints publish {RUN}", "there is no checkpoint", CHECKPOINTS),
        (f"checkpoints unpublish {RUN}", "there is no checkpoint", CHECKPOINTS),
        (f"checkpoints delete -y {RUN}", "there is no checkpoint", CHECKPOINTS),
        ("checkpoints import /nowhere", "/nowhere/adapter_config.json is not there", "save_pretrained"),
        ("sample x --model nope", "'nope'", "`tinsmith status`"),
        ("chat x --model nope", "'nope'", "`tinsmith status`"),
        ("sample ''", "the prompt is empty", "at least one character"),
        ("models remove nope", "base model 'nope' is not served", "`tinsmith models list`"),
        ("models remove acme/tiny", "is one of the server's settings", "take it out there"),
        ("keys revoke nope", "there is no key 'nope'", "`tinsmith keys list`"),
        ("keys rotate nope", "there is no key 'nope'", "`tinsmith keys list`"),
        ("keys create k --role boss", "role", "`tinsmith keys create --help`"),
        ("keys create k --user bob", "there is no member 'bob'", "`tinsmith users list`"),
        ("keys create k --project nope", "there is no project 'nope'", "there are: default"),
        ("projects archive nope", "there is no project 'nope'", "there are: default"),
        ("projects create ''", "name", "`tinsmith projects create --help`"),
        ("users delete bob", "there is no user 'bob'", "`tinsmith users create NAME`"),
        ("limits show --key nope", "there is no key 'nope'", "`tinsmith keys list`"),
        ("tokenizer nope /nowhere", "/nowhere holds no tokenizer", "second argument"),
        ("openapi --output /nowhere/x", "/nowhere/x cannot be written", "--output"),
    ],
)
def test_what_is_not_there_or_refused(server: IdleServer, line: str, cause: str, remedy: str) -> None:
    first, second = told(run(line, server), FAILED)
    assert cause in first
    assert remedy in second


def test_what_takes_its_time_says_so_before_it_fails(server: IdleServer, tmp_path: Path) -> None:
    for line, does, cause in (
        ("models add nope=/nowhere", "loading nope", "there is no folder '/nowhere'"),
        ("models add nope", "loading nope", "neither an existing folder"),
        (f"backup {tmp_path}/b --data-dir /nowhere", "copying /nowhere", "there is no data folder"),
    ):
        done = run(line, server)
        progress, first, second = done.stderr.splitlines()
        assert "`tinsmith models add --help`" not in second, "it says only: as for serve"
        assert (done.exit_code, progress.startswith(does)) == (FAILED, True), done.output
        assert first.startswith("error: ")
        assert cause in first
        assert second.startswith("help: ")


def test_the_server_and_the_key(server: IdleServer, tmp_path: Path) -> None:
    for options, code, cause, remedy in (
        (f"--url http://127.0.0.1:{free_port()} --api-key tml-x", UNREACHABLE, "no server answers", "tinsmith serve"),
        (f"--url {server.url} --api-key tml-x", NOT_ALLOWED, "does not know this API key", "--api-key"),
        (f"--url {server.url} --data-dir {tmp_path}", NOT_ALLOWED, "no API key", "TINSMITH_KEY"),
        ("--url bad --api-key tml-x", USAGE, "'bad' is not the address", "http://127.0.0.1:8410"),
    ):
        for command in ("runs list", "demo --model acme/tiny"):  # the SDK, which the demo uses, would try for minutes
            first, second = told(run(f"{command} {options}"), code)
            assert cause in first
            assert remedy in second


def test_a_demo_that_cannot_write_its_adapter_says_so_before_it_trains(server: IdleServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cause, remedy = told(run(f"demo --model acme/tiny --output {tmp_path}/file/adapter", server), FAILED)
    assert f"{tmp_path}/file" in cause
    assert "place" in remedy


def test_what_is_not_utf_8(server: IdleServer) -> None:
    sent = CliRunner().invoke(
        cli.app, ["sample", "-", "--model", "m"], input=b"a\xff", env={"TINSMITH_URL": server.url, "TINSMITH_KEY": "k"}
    )
    for done in (run("keys create 'a\udcff'", server), run("chat 'a\udcff' --model m", server), sent):
        cause, remedy = told(done, USAGE)
        assert "UTF-8" in cause
        assert "iconv" in remedy


def test_a_reader_that_goes_away_is_not_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("a line of the log\n" * 20_000)
    command = [
        sys.executable,
        "-c",
        "from app.cli import main; main()",
        "logs",
        "-n",
        "20000",
        "--data-dir",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == b"a line of the log\n"
        program.stdout.close()
        assert program.stderr.read() == b""


@pytest.mark.parametrize(
    ("now", "days", "first"),
    [
        ("2026-12-01T22:59:59", 1, "2026-12-01"),
        ("2026-12-01T23:30:00", 1, "2026-12-01"),
        ("2026-12-01T23:30:00", 7, "2026-11-25"),
        ("2026-12-01T23:30:00", 14, "2026-11-18"),
        ("2026-12-02T00:00:00", 2, "2026-12-01"),
    ],
)
def test_usage_counts_today_also_in_its_last_hour(now: str, days: int, first: str) -> None:
    window = window_of(days, datetime.fromisoformat(now).replace(tzinfo=UTC))
    assert window["starting_on"] == f"{first}T00:00:00+00:00"
    length = datetime.fromisoformat(window["ending_before"]) - datetime.fromisoformat(window["starting_on"])
    assert timedelta(days=days - 1) < length <= timedelta(days=MOST_DAYS)


def test_lists_without_an_item_say_how_to_make_the_first(server: IdleServer) -> None:
    for line, remedy in (
        ("runs list", "`tinsmith demo`"),
        ("checkpoints list", "`tinsmith checkpoints import FOLDER`"),
        ("users list", "`tinsmith users create NAME`"),
        ("runs list --offset 9", "--offset"),
    ):
        done = run(line, server)
        assert (done.exit_code, done.stdout) == (0, ""), done.output
        assert remedy in done.stderr
    assert "no training runs yet" in run("status", server).stdout


def test_no_room_on_the_disk_and_a_question_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere/file")

    monkeypatch.setattr(output, "print_json", full)
    monkeypatch.setattr("app.commands.version.print_json", full)
    cause, remedy = told(run("version --json"), FAILED)
    assert cause == "/somewhere/file: No space left on device"
    assert "room" in remedy

    def aborted(*_: object, **__: object) -> None:
        import typer

        raise typer.Abort

    monkeypatch.setattr("app.commands.version.print_json", aborted)
    assert told(run("version --json"), STOPPED)[0].startswith("stopped")
