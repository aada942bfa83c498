"""Trains an adapter on the server, and asks the server what it makes of some texts.

Not responsible for exports, or for what other programs say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from tinker import types

VERSES = Path(__file__).resolve().parents[2] / "examples" / "data" / "verses.jsonl"
LIKELIEST = 20
"""Of how many next tokens the logprobs are compared, at each position: as many as a request may ask for."""

TEXTS = (
    "Tyger Tyger, burning bright,\nIn the forests of",
    "The capital of France is",
    "def mean(values: list[float]) -> float:\n    return",
    "Zwölf Boxkämpfer jagen 12345 große Hunde; \U0001f600 quer",
)
QUESTION = "Recite a poem by William Blake."
STEPS = 8
TOKENS = 24


@dataclass(frozen=True)
class Said:
    """What the server says of one text.

    Attributes:
        prompt: token ids of the text.
        greedy: token ids of its likeliest continuation.
        likeliest: for each token of `prompt` but the first, and each of `greedy`: token id -> logprob before it.
    """

    prompt: list[int]
    greedy: list[int]
    likeliest: list[dict[int, float]]


def trained(service: tinker.ServiceClient, model: str) -> tuple[str, str, list[float]]:
    """An adapter of all layers and the head that has read some verses; checkpoint, sampler checkpoint, losses."""
    client = service.create_lora_training_client(base_model=model, rank=16, seed=1).result()
    tokenizer = client.get_tokenizer()
    texts = [json.loads(line)["text"] for line in VERSES.read_text("utf-8").splitlines()]
    data = []
    for text in texts:
        tokens = tokenizer.encode(text)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    losses = []
    for _ in range(STEPS):
        gradient = client.forward_backward(data, loss_fn="cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        losses.append(float(gradient.result().metrics["loss:sum"]))
    saved = client.save_state("exports").result().path
    return saved, client.save_weights_for_sampler("exports").result().path, losses


def said(sampler: tinker.SamplingClient, prompts: Sequence[Sequence[int]]) -> list[Said]:
    """What the sampler says of each prompt."""
    params = types.SamplingParams(max_tokens=TOKENS, temperature=0.0, seed=0, stop=[])
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(list(prompt)),
            num_samples=1,
            sampling_params=params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=LIKELIEST,
            topk_sample_logprobs=LIKELIEST,
        )
        for prompt in prompts
    ]
    found = []
    for prompt, future in zip(prompts, futures, strict=True):
        answer = future.result()
        sequence = answer.sequences[0]
        rows = [*(answer.topk_prompt_logprobs or [])[1:], *(sequence.topk_logprobs or [])]
        found.append(Said(list(prompt), list(sequence.tokens), [dict(row or []) for row in rows]))
    return found
