"""The training benchmark on a tiny model: it compares equal work, and says so when it does not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training import cases, command
from benchmarks.training.engine_side import turns
from benchmarks.training.measure import Measured, Series, UnequalWork, check
from benchmarks.training.peft_side import IGNORED, padded
from benchmarks.training.texts import Texts
from benchmarks.training.work import Example, Outcome, SideSpec, Took, Work
from tests.support.tiny_model import make_tiny_model


def example(length: int) -> Example:
    """Counting."""
    return Example(np.arange(length), np.arange(1, length + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's."""
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


def run(folder: Path, out: Path, *words: str) -> Any:
    """The command on the tiny model; its JSON."""
    parser = argparse.ArgumentParser()
    cases.arguments(parser)
    command.run(parser.parse_args(["--quick", "--model", str(folder), "--json", str(out), "--repeats", "1", *words]))
    return json.loads(out.read_text())


@pytest.mark.exhaustive
def test_sides_do_equal_work_and_are_compared(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(folder, tmp_path / "out.json", "--cases", "tenants", "--tenants", "2", "--dtypes", "float32")
    (case,) = found["cases"]
    peft, engine = case["rows"]
    assert case["tokens"] == 64
    assert len(engine["rounds"]) == 1
    np.testing.assert_allclose(engine["losses_by_step"], peft["losses_by_step"], rtol=1e-5)
    assert engine["losses_by_step"][1] < engine["losses_by_step"][0]
    compared = engine["times_as_fast"]["peft float32, in turn"]
    assert compared["wall"] == pytest.approx(peft["rounds"][0]["wall"] / engine["rounds"][0]["wall"])
    assert case["bounds"]["float32"]["tokens_per_cpu_second"] > engine["tokens_per_cpu_second"]
    assert "2 tenants, 1 x 32 tokens" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_memory_is_that_of_a_process_with_one_row(folder: Path, tmp_path: Path) -> None:
    found = run(folder, tmp_path / "out.json", "--cases", "memory", "--dtypes", "float32", "--length", "32")
    short, long = found["cases"]
    assert [row["label"] for row in long["rows"]] == [
        "peft float32, checkpointing",
        "engine float32",
        "engine float32, checkpointing",
    ]
    assert all(row["rss_peak_bytes"] >= row["rss_before_bytes"] > 0 for row in [*short["rows"], *long["rows"]])


def test_unequal_losses_are_refused() -> None:
    side = SideSpec("peft", "", "float32", "cpu", 1, 8)
    rows = (cases.Row("one", side), cases.Row("other", side))
    took = [Took(1.0, 1.0, 0, 0, Outcome())]
    case = cases.Case("equal", "", Work(((example(4),),)), rows)
    check(Measured(case, [Series(rows[0], took, [10.0, 9.0]), Series(rows[1], took, [10.0, 9.0])]))
    for losses in ([10.01, 9.0], [10.0, 9.01], [float("nan"), 9.0]):
        with pytest.raises(UnequalWork, match="the loss of other is"):
            check(Measured(case, [Series(rows[0], took, [10.0, 9.0]), Series(rows[1], took, losses)]))


def test_turns_take_every_datum_once_and_keep_to_the_budget() -> None:
    clients = [[example(n) for n in lengths] for lengths in ([5, 5, 30], [2], [8, 8])]
    seen: dict[str, list[int]] = {}
    for turn in turns(clients, 10):
        taken = [(part.operation_id, index) for part in turn for index in range(part.start, part.stop)]
        assert len(taken) == 1 or sum(len(clients[int(name)][index].tokens) for name, index in taken) <= 10
        for name, index in taken:
            seen.setdefault(name, []).append(index)
    assert seen == {"0": [0, 1, 2], "1": [0], "2": [0, 1]}


def test_padding_counts_for_nothing() -> None:
    ids, targets, mask = padded((example(2), example(4)), torch.device("cpu"))
    assert ids.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert targets.tolist() == [[1, 2, IGNORED, IGNORED], [1, 2, 3, 4]]
    assert mask is not None
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert padded((example(3), example(3)), torch.device("cpu"))[2] is None


def test_ragged_texts_span_the_wanted_lengths(folder: Path) -> None:
    batch = Texts(folder).ragged(8, 32, 512)
    lengths = sorted(len(each.tokens) for each in batch)
    assert lengths[0] == pytest.approx(32, abs=4)
    assert lengths[-1] == pytest.approx(512, abs=16)
    assert len(set(lengths)) == 8
    assert all((each.tokens[1:] == each.targets[:-1]).all() for each in batch)
