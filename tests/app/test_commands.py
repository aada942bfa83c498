"""What holds for all commands: help at once, one form of JSON, nothing that steers a terminal, a page that is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app import cli
from app.cli_docs import page
from app.commands import output
from app.commands.chart import chart, number
from app.commands.client import DEFAULT_DATA_DIR
from app.commands.lazy import load
from app.settings import Settings

ROOT = Path(__file__).parents[2]
runner = CliRunner()
SAY_NOTHING = {
    "serve", "logs", "backup", "demo", "tokenizer", "openapi",
    "keys revoke", "projects archive", "users delete", "users grant", "users withdraw",
    "checkpoints publish", "checkpoints unpublish", "checkpoints delete", "models add", "models remove",
}  # fmt: skip
"""Commands that print no data, or (logs) that of another program."""


def commands() -> dict[str, Any]:
    """Every command by its words."""
    found = {}
    for name, entry in cli.COMMANDS.items():
        command = load(name, entry)
        if entry.group:
            found |= {f"{name} {each}": sub for each, sub in command.commands.items()}
        else:
            found[name] = command
    return found


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from app import cli\n"
        "from app.commands.lazy import load\n"
        "def show(*words):\n"
        "    try: cli.app([*words, '--help'])\n"
        "    except SystemExit as end: assert not end.code, words\n"
        "show()\n"
        "for name, entry in cli.COMMANDS.items():\n"
        "    if name == 'serve': continue\n"
        "    show(name)\n"
        "    for each in load(name, entry).commands if entry.group else ():\n"
        "        show(name, each)\n"
        "light = {'torch', 'transformers', 'fastapi', 'sqlalchemy', 'httpx', 'pydantic', 'rich', 'numpy', 'tinker'}\n"
        "assert not light & set(sys.modules), light & set(sys.modules)\n"
        "show('serve')\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'sqlalchemy', 'httpx', 'tinker'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "checkpoints" in done.stdout


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == page(), "run `make docs`"


def test_every_command_that_prints_data_has_json_in_the_one_form() -> None:
    without = {name for name, command in commands().items() if "--json" not in str([p.opts for p in command.params])}
    assert without == SAY_NOTHING
    for kind in output.KINDS:
        source = "".join(path.read_text() for path in (ROOT / "app" / "commands").glob("*.py"))
        assert f'print_json("{kind}"' in source or f'show("{kind}"' in source, kind
    with pytest.raises(ValueError, match="other is not described"):
        output.print_json("other", {})
    document = json.loads(runner.invoke(cli.app, ["version", "--json"]).output)
    assert document == {"kind": "version", "data": {"version": runner.invoke(cli.app, ["--version"]).output.strip()}}


def test_the_default_folder_is_that_of_the_settings() -> None:
    assert Path(DEFAULT_DATA_DIR).expanduser() == Settings().data_dir


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant() -> None:
    done = runner.invoke(cli.app, ["chekpoints"])
    assert (done.exit_code, "`tinsmith checkpoints`" in done.stderr) == (output.USAGE, True)


EVIL = "a\x1b[31m\x1b]0;title\x07\x9b2J\r\n\u202eb\u2066\u200b\ufeff\U000e0041\x7f\udc80c"


def test_nothing_that_steers_a_terminal_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output.plain(EVIL)
    assert shown.isascii()
    assert shown.startswith("a\\x1b[31m\\x1b]0;title\\x07\\x9b2J\\x0d\\x0a\\u202eb")
    assert output.plain("Zwölf 漢字 \N{GRINNING FACE}") == "Zwölf 漢字 \N{GRINNING FACE}"
    assert output.prose("one\n\ttwo\x1b[2J\r") == "one\n\ttwo\\x1b[2J\\x0d"
    output.print_table(("name", "size"), [(EVIL, 1), ("漢", None)], right=("size",))
    output.print_facts({"name": EVIL})
    output.print_json("version", {"version": EVIL})
    output.say(EVIL)
    with pytest.raises(SystemExit):
        raise SystemExit(output.fail(EVIL, EVIL).exit_code)
    written = "".join(capsys.readouterr())
    assert not [
        each for each in written if each != "\n" and (ord(each) < 32 or (each in EVIL and not each.isprintable()))
    ]


def test_columns_stand_under_each_other_whatever_is_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", "n"), [("漢字", 1), ("e\u0301", 22), ("plain", None)], right=("n",))
    assert capsys.readouterr().out.splitlines() == ["name    n", "漢字    1", "e\u0301      22", "plain   -"]


def test_sizes_and_times_are_for_people() -> None:
    assert [output.size_text(each) for each in (None, 12, 1200, 5e6, 2.5e9)] == [
        None,
        "12 B",
        "1.2 kB",
        "5.0 MB",
        "2.5 GB",
    ]
    assert output.time_text("2026-07-13T02:03:04.5+02:00") == "2026-07-13 00:03:04"
    assert (output.time_text(None), output.time_text("soon")) == (None, "soon")


def test_a_chart_shows_the_course_of_its_values() -> None:
    lines = chart([1.0, 0.5, 0.0], 20, 2)
    assert len(lines) == 2
    assert lines[0].split()[0] == "1"
    assert lines[1].split()[0] == "0"
    assert lines[0][10] != lines[1][10]
    assert max(map(len, chart([float(each) for each in range(1000)], 40, 3))) <= 40
    assert len(chart([2.0, 2.0], 20, 1)) == 1
    gap = chart([1.0, None, float("nan"), 0.0], 20, 1)[0]
    assert len(gap) == 12
    assert "nothing" in chart([None, float("inf")], 60, 3)[0]


def test_numbers_are_short() -> None:
    shown = [number(each) for each in (None, 0.0, 0.00012345, 1.23456, 12345.678, 1e9, -3e-7)]
    assert shown == ["-", "0", "1.23e-04", "1.235", "1.235e+04", "1.00e+09", "-3.00e-07"]


def test_the_log_goes_to_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "new" / "server.log"
    code = (
        "import logging, sys; from pathlib import Path; from app import logging as server_log\n"
        "server_log.configure('info', 'text', Path(sys.argv[1]))\n"
        "logging.getLogger('x').info('hello')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, file.read_text())
    assert file.read_text().endswith(" INFO x: hello\n")
    assert file.stat().st_mode & 0o077 == 0
    (tmp_path / "a_file").touch()
    options = ["--port", "0", "--data-dir", str(tmp_path / "d"), "--log-file", str(tmp_path / "a_file" / "x.log")]
    refused = runner.invoke(cli.app, ["serve", *options])
    assert (refused.exit_code, "cannot be written" in refused.stderr) == (output.FAILED, True)
    assert not (tmp_path / "d").exists()


def test_a_table_that_is_too_wide_for_the_terminal_becomes_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("s:train:0", 8), ("s:train:1", None)]
    output.print_table(("run", "rank"), rows, right=("rank",), empty="none")
    assert capsys.readouterr().out.splitlines()[0] == "run        rank"
    monkeypatch.setenv("COLUMNS", "14")
    output.print_table(("run", "rank"), rows)
    assert len(capsys.readouterr().out.splitlines()) == 3, "a pipe gets the table, however wide"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.print_table(("run", "rank"), rows)
    assert capsys.readouterr().out.splitlines() == ["run   s:train:0", "rank  8", "", "run   s:train:1", "rank  -"]


def test_what_takes_its_time_has_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    with output.working("looking") as tell:
        tell("checking \x1b[2J")
    assert capsys.readouterr() == ("", "looking\nchecking \\x1b[2J\n")


def test_headings_are_written_alike() -> None:
    headings = re.findall(
        r"print_table\(\s*\(([^)]*)\)", "".join(p.read_text() for p in sorted(ROOT.glob("app/commands/*.py")))
    )
    words = [word for heading in headings for word in re.findall(r'"([^"]+)"', heading)]
    assert len(words) > 20
    assert [word for word in words if word != word.lower()] == ["GB-hours"] * words.count("GB-hours")
