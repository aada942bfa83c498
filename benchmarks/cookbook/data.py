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
    whole: list[Row] = [{"messages": talk} for talk in talks]
    write(folder / "HuggingFaceH4" / "no_robots", {"train": whole, "test": whole[:4]})
    write(folder / "allenai" / "tulu-3-sft-mixture", {"train": whole})
    pairs = list(preferences(talks))
    write(folder / "Anthropic" / "hh-rlhf", {"train": pairs[4:], "test": pairs[:4]})
    asked = list(questions(64))
    write(folder / "openai" / "gsm8k", {"train": asked, "test": asked[:4]}, config="main")
    write(folder / "zwhe99" / "DeepMath-103K", {"train": asked})
    write(folder / "open-thoughts" / "OpenThoughts3-1.2M", {"train": [thought(talk) for talk in talks]})
    write(folder / "hicai-zju" / "SciKnowEval", {"test": list(choices(24))})
    lines = [{"text": message["content"].replace("\n", " ")} for talk in talks for message in talk]
    write(folder / "Salesforce" / "wikitext", {"train": lines}, config="wikitext-103-raw-v1")
    (folder / "languages.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in languages()), "utf-8")
    (folder / "tinker_cookbook" / "example_data").mkdir(parents=True)  # where one recipe writes, as in a checkout


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


def thought(talk: Sequence[Row]) -> Row:
    """A conversation in the form of OpenThoughts3."""
    names = {"user": "human", "assistant": "gpt"}
    kept = [message for message in talk if message["role"] in names]
    return {"conversations": [{"from": names[each["role"]], "value": each["content"]} for each in kept]}


def choices(count: int) -> Iterable[Row]:
    """Questions with four answers in the form of SciKnowEval."""
    draw = random.Random(0)
    for _ in range(count):
        number = draw.randint(2, 9)
        texts = [str(number + shift) for shift in (3, 0, 1, 2)]
        yield {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
            "question": f"A molecule has {number} atoms. How many atoms does it have?",
            "choices": {"label": ["A", "B", "C", "D"], "text": texts},
            "answerKey": "B",
        }


def languages() -> Iterable[Row]:
    """Sentences and their languages, as the recipe's teacher labels them."""
    for label, sentence in (
        ("en", "The river is high today, and the bridge is closed."),
        ("de", "Der Fluss steht heute hoch, und die Brücke ist gesperrt."),
        ("fr", "La rivière est haute aujourd'hui, et le pont est fermé."),
        ("es", "El río está alto hoy y el puente está cerrado."),
        ("tr", "Bugün nehir yüksek ve köprü kapalı."),
        ("el", "Το ποτάμι είναι ψηλό σήμερα και η γέφυρα είναι κλειστή."),
        ("ru", "Река сегодня высокая, и мост закрыт."),
        ("zh", "今天河水很高，桥关闭了。"),
    ):
        yield {"messages": [{"role": "user", "content": sentence}, {"role": "assistant", "content": label}]}


def thinking_model(base_model: Path, folder: Path) -> Path:
    """The base model with a tokenizer in which `<think>` and `</think>` are one token each, in place of unused ones."""
    folder.mkdir()
    for file in base_model.iterdir():
        (folder / file.name).symlink_to(file)
    target = folder / "tokenizer.json"
    tokenizer = target.read_text("utf-8")
    target.unlink()
    for old, new in (("<jupyter_script>", "<think>"), ("<empty_output>", "</think>")):
        if f'"{old}"' not in tokenizer:
            raise ValueError(f"the tokenizer has no {old}")
        tokenizer = tokenizer.replace(f'"{old}"', f'"{new}"')
    target.write_text(tokenizer, "utf-8")
    return folder
