"""Every example runs on one server with a tiny model, and what it teaches is so. Notebooks have the same cells."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.notebooks import NAMES
from tests.support.server import RunningServer, free_port, serve
from tests.support.tiny_model import make_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tiny_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script as `python examples/NAME.py OPTIONS` would, in this process; returns its names."""
    monkeypatch.setenv("TINKER_BASE_URL", tiny_server.url)
    monkeypatch.setenv("TINKER_API_KEY", tiny_server.key)
    monkeypatch.setenv("TINKER_MODEL", "acme/tiny")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(EXAMPLES)

    def execute(name: str, *options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return execute


def test_sft_loss_falls(run: Run) -> None:
    names = run("sft", "--steps", "5", "--learning-rate", "1e-2", "--max-tokens", "8")
    assert names["losses"][-1] < names["losses"][0] - 1
    assert names["held_out_losses"][-1] < names["held_out_losses"][0]
    assert names["checkpoint"].endswith("/weights/sft")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_loss_falls_in_other_precisions(run: Run, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hardware has units for, as a newcomer gets it; all other tests have servers in float32."""
    model = f"acme/tiny={make_tiny_model(tmp_path / 'model')}"
    with serve(tmp_path / "data", ["--base-model", model], extra_environment={"TINSMITH_DTYPE": dtype}) as server:
        monkeypatch.setenv("TINKER_API_KEY", server.key)
        options = ("--steps", "5", "--learning-rate", "1e-2", "--max-tokens", "8")
        losses = run("sft", "--base-url", server.url, *options)["losses"]
    assert losses[-1] < losses[0] - 1


def test_an_address_without_a_server_is_told_at_once(run: Run) -> None:
    for address in (f"http://127.0.0.1:{free_port()}", "127.0.0.1:8410"):
        with pytest.raises(SystemExit, match=f"no server answers at {address} "):
            run("sft", "--base-url", address)


def test_dpo_margin_rises_from_nothing(run: Run) -> None:
    names = run("dpo", "--steps", "3", "--learning-rate", "2e-3")
    assert names["losses"][0] == pytest.approx(0.6931, abs=1e-3)
    assert names["margins"][0] == pytest.approx(0, abs=1e-4)
    assert names["margins"] == sorted(names["margins"])
    assert names["margins"][-1] > 0.1


def test_rl_reward_rises(run: Run) -> None:
    rewards = run("rl", "--steps", "8", "--questions", "2", "--learning-rate", "3e-2")["rewards"]
    assert sum(rewards[-2:]) > 2 * sum(rewards[:2])
    assert rewards[-1] > 0.2


def test_custom_loss_equals_the_one_that_is_built_in(run: Run) -> None:
    names = run("custom_loss", "--steps", "3", "--learning-rate", "1e-2")
    assert names["sums"][0] == pytest.approx(names["sums"][1], rel=1e-5)
    assert names["norms"][0] == pytest.approx(names["norms"][1], rel=1e-5)
    assert names["norms"][0] > 0
    assert names["losses"][-1] < names["losses"][0]
    assert names["likely"][-1] > names["likely"][0]


def test_distillation_brings_the_student_nearer(run: Run) -> None:
    names = run("distill", "--teacher-steps", "4", "--steps", "5", "--learning-rate", "2e-2", "--group", "6")
    divergences = names["divergences"]
    assert divergences[0] > 0.5, "the teacher must have something to teach"
    assert divergences[-1] < 0.8 * divergences[0]


def test_sweep_finds_the_best_learning_rate(run: Run) -> None:
    names = run("sweep", "--steps", "3", "--learning-rates", "1e-4", "1e-2", "1")
    assert names["best"] == 1e-2
    assert names["final"][1e-2] < names["final"][1e-4] < names["final"][1]


def test_plain_http_learns_and_recites(run: Run) -> None:
    names = run("plain_http", "--steps", "8", "--learning-rate", "1e-2")
    assert names["losses"][-1] < names["losses"][0] / 4
    assert names["drawn"] == names["tokens"][5:]


def test_a_wrong_key_is_said_in_a_line(run: Run) -> None:
    with pytest.raises(SystemExit, match=r"create_session: .*key"):
        run("plain_http", "--api-key", "tml-wrong")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_cells_of_its_script(name: str) -> None:
    """Run `make notebooks` if not."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [(each["cell_type"], "".join(each["source"]).strip("\n")) for each in notebook["cells"]]
    assert cells == list(cells_of((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
    assert (EXAMPLES / f"{name}.ipynb").stat().st_size < 200_000


def cells_of(script: str) -> list[tuple[str, str]]:
    """The cells of a script in the percent format, which it begins with."""
    first, *parts = script.split("# %%")
    assert first == ""
    cells = []
    for part in parts:
        head, _, body = part.partition("\n")
        if head == " [markdown]":
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip("\n").splitlines())
        cells.append(("markdown" if head else "code", body.strip("\n")))
    return cells
