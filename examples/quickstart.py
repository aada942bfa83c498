"""Fine-tune a model on a few public-domain poems with the official `tinker` SDK, unmodified.

    export TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=$(cat DATA_DIR/dev_key)
    python examples/quickstart.py

The same script runs against the hosted service: leave TINKER_BASE_URL out and pass `--model` with one of its names.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tinker import types

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
VERSES = Path(__file__).with_name("data") / "verses.jsonl"


@dataclass(frozen=True)
class Report:
    """What the run measured: loss per trained token (nats) at every step, the two samples, and what was saved."""

    losses: list[float]
    before: str
    after: str
    checkpoint: str
    exported: list[Path]


def question(tokenizer: Any, verse: dict[str, str]) -> list[int]:
    """Token ids of the chat prompt that asks for one poem."""
    message = {"role": "user", "content": f"Recite the opening of {verse['title']} by {verse['author']}."}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def example(tokenizer: Any, verse: dict[str, str]) -> types.Datum:
    """One training example: the prompt has weight 0, the poem and the end of the turn have weight 1."""
    prompt = question(tokenizer, verse)
    answer = [*tokenizer.encode(verse["text"], add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def recite(sampler: tinker.SamplingClient, tokenizer: Any, verse: dict[str, str]) -> str:
    """The model's greedy answer to one question."""
    prompt = question(tokenizer, verse)
    params = types.SamplingParams(max_tokens=60, temperature=0.0)
    response = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
    return str(tokenizer.decode(response.sequences[0].tokens, skip_special_tokens=True)).strip()


def train(
    client: tinker.TrainingClient, data: list[types.Datum], steps: int, learning_rate: float, console: Console
) -> list[float]:
    """Full-batch AdamW; returns the loss per trained token before each step."""
    trained_tokens = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in data)
    losses: list[float] = []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    shown = console.is_terminal  # a bar that moves, or a line now and then
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not shown) as progress:
        task = progress.add_task("training", total=steps, loss="...")
        for number in range(1, steps + 1):
            # Both requests are sent before either is awaited, so that the server runs them back to back.
            gradient = client.forward_backward(data, loss_fn="cross_entropy")
            step = client.optim_step(types.AdamParams(learning_rate=learning_rate))
            losses.append(gradient.result().metrics["loss:sum"] / trained_tokens)
            step.result()
            progress.update(task, advance=1, loss=f"{losses[-1]:.3f}")
            if not shown and (number % 5 == 0 or number == steps):
                console.print(f"step {number} of {steps}: loss {losses[-1]:.3f}")
    return losses


def export(rest: tinker.RestClient, client: tinker.TrainingClient, folder: Path) -> list[Path]:
    """Download the adapter as a PEFT folder (`adapter_config.json` + `adapter_model.safetensors`)."""
    path = client.save_weights_external(f"quickstart-{int(time.time())}", ttl_seconds=3600).result().path
    files = rest.get_external_weights_urls(path).result()
    written = []
    for name, url in sorted(files.urls.items()):
        target = folder / Path(name).name
        urllib.request.urlretrieve(url, target)
        written.append(target)
    return written


def run(
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    model: str = DEFAULT_MODEL,
    steps: int = 20,
    learning_rate: float = 1e-3,
    rank: int = 16,
    output: Path = Path("quickstart-adapter"),
    console: Console | None = None,
) -> Report:
    """The whole run, from an empty adapter to an exported one."""
    console = console or Console()
    output.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before minutes of work
    verses = [json.loads(line) for line in VERSES.read_text(encoding="utf-8").splitlines()]
    with tinker.ServiceClient(base_url=base_url, api_key=api_key) as service:
        console.print(f"creating a rank-{rank} adapter on {model} ...")
        client = service.create_lora_training_client(base_model=model, rank=rank).result()
        tokenizer = client.get_tokenizer()
        data = [example(tokenizer, verse) for verse in verses]

        before = recite(service.create_sampling_client(base_model=model).result(), tokenizer, verses[0])
        console.print(f"[bold]before:[/bold] {before}\n")
        losses = train(client, data, steps, learning_rate, console)
        after = recite(client.save_weights_and_get_sampling_client().result(), tokenizer, verses[0])
        console.print(f"\n[bold]after:[/bold] {after}\n")
        console.print(f"loss per token: {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")

        checkpoint = client.save_state(f"quickstart-{int(time.time())}").result().path
        # On one line, however narrow the terminal is, so that the path can be copied.
        console.print(f"saved {checkpoint}", soft_wrap=True)
        console.print("(resume with create_training_client_from_state_with_optimizer)")
        exported = export(tinker.RestClient(base_url=base_url, api_key=api_key), client, output)
        console.print(
            f"exported {', '.join(file.name for file in exported)} to {output}/ (PEFT format)", soft_wrap=True
        )
    return Report(losses, before, after, checkpoint, exported)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a model on a few poems.")
    parser.add_argument("--base-url", help="server to use (default: TINKER_BASE_URL, else the hosted service)")
    parser.add_argument("--api-key", help="API key (default: TINKER_API_KEY)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="base model to adapt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="AdamW learning rate (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("quickstart-adapter"), help="where to put the adapter")
    options = parser.parse_args()
    run(
        base_url=options.base_url,
        api_key=options.api_key,
        model=options.model,
        steps=options.steps,
        learning_rate=options.learning_rate,
        rank=options.rank,
        output=options.output,
    )


if __name__ == "__main__":
    main()
