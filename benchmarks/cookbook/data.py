"""Small local stand-ins for what the recipes load from the hub, made of the conversations that the cookbook ships.

`datasets.load_dataset("org/name")` takes the folder ./org/name of the current directory before it asks the hub, so the
recipes run unchanged in the folder that `prepare` fills.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def prepare(folder: Path, conversations: Path) -> None:
    """Fill `folder` with the data sets. `conversations`: JSON lines with `messages`, as the cookbook's example data."""
    talks = [json.loads(line)["messages"] for line in conversations.read_text("utf-8").splitlines()]
    write(folder / "HuggingFaceH4" / "no_robots", {"train": [{"messages": talk} for talk in talks]})
    write(folder / "allenai" / "tulu-3-sft-mixture", {"train": [{"messages": talk} for talk in talks]})
    pairs = list(preferences(talks))
    write(folder / "Anthropic" / "hh-rlhf", {"train": pairs[4:], "test": pairs[:4]})
    write(folder / "openai" / "gsm8k", {"train": list(questions(64))}, config="main")


def write(folder: Path, splits: Mapping[str, Sequence[Row]], config: str = "default") -> None:
    """A data set folder: one file of JSON lines for each split, and the README that says so."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, "utf-8")
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), "utf-8")


def preferences(talks: Sequence[Sequence[Row]]) -> Iterable[Row]:
    """Pairs in the form of hh-rlhf: the right answer is chosen, the answer to the next question is rejected."""
    short = [
        (talk[-2]["content"], talk[-1]["content"])
        for talk in talks
        if talk[-1]["role"] == "assistant" and len(talk[-1]["content"]) < 300
    ]
    for (question, answer), (_, other) in zip(short, short[1:] + short[:1], strict=True):
        prompt = f"\n\nHuman: {question}\n\nAssistant: "
        yield {"chosen": prompt + answer, "rejected": prompt + other}


def questions(count: int) -> Iterable[Row]:
    """Questions in the form of gsm8k which say the answer as the recipe wants it.

    Of a few samples a small model gets some right and some wrong: only then is there anything to train on.
    """
    draw = random.Random(0)
    for _ in range(count):
        number = draw.randint(2, 9)
        question = f"Tom has \\boxed{{{number}}} apples. How many apples does Tom have?"
        yield {"question": question, "answer": f"He has {number}.\n#### {number}"}
