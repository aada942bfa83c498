"""The baseline: `generate` of transformers, with peft for adapters, as a user without a server calls it.

Prompts of one adapter go together, padded on the left, in batches of at most `most_rows` rows; adapters take turns.
`PagedSide` is transformers' own continuous batching (`generate_batch`), which knows one adapter at a time as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.sampling.work import Ask, Clock, SampleWork, adapter
from benchmarks.training.work import Outcome, SideSpec
from schemas.operations import LORA_ALPHA

PAGE = 256


class GenerateSide:
    """A model with as many peft adapters as the spec has clients; the plain model if it has none."""

    def __init__(self, spec: SideSpec) -> None:
        torch.set_num_threads(spec.threads)
        dtype = getattr(torch, spec.dtype)
        base = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=dtype, attn_implementation="sdpa")
        self.model: Any = base
        weights = [adapter(base, spec.rank, number) for number in range(spec.clients)]
        if weights:
            lora = LoraConfig(
                r=spec.rank,
                lora_alpha=LORA_ALPHA,
                lora_dropout=0.0,
                target_modules=list(weights[0].pairs),
                task_type="CAUSAL_LM",
            )
            self.model = get_peft_model(base, lora, adapter_name="0")
            for number in range(1, spec.clients):
                self.model.add_adapter(str(number), lora)
            named = dict(self.model.named_parameters())
            for number, each in enumerate(weights):
                for module, (down, up) in each.pairs.items():
                    named[f"base_model.model.{module}.lora_A.{number}.weight"].data.copy_(down)
                    named[f"base_model.model.{module}.lora_B.{number}.weight"].data.copy_(up)
        self.model.to(spec.device).eval()
        self.device = torch.device(spec.device)

    @torch.inference_mode()
    def step(self, work: SampleWork) -> Outcome:
        """Batch after batch."""
        clock, began = Clock(), time.perf_counter()
        drawn: dict[int, list[list[int]]] = {}
        for indices in batches(work):
            asks = [work.asks[index] for index in indices]
            self._choose(asks[0].adapter)
            rows = [(index, row) for index in indices for row in range(work.asks[index].samples)]
            streamer = _Streamer(clock, rows, [work.asks[index].new for index, _ in rows], began)
            ids, mask = padded_left([ask.prompt for ask in asks], self.device)
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config(asks[0], max(ask.new for ask in asks)),
                streamer=streamer,
            )[:, ids.shape[1] :].tolist()
            for (index, _), tokens in zip(rows, output, strict=True):
                drawn.setdefault(index, []).append(tokens[: work.asks[index].new])
        return clock.outcome(drawn)

    def _choose(self, number: int | None) -> None:
        if number is not None:
            self.model.set_adapter(str(number))

    def cpu_seconds(self) -> float:
        """This process has no children."""
        return time.process_time()

    def close(self) -> None:
        """Nothing was started."""


class PagedSide(GenerateSide):
    """The same models with `generate_batch`; prompts are taken in as it likes."""

    @torch.inference_mode()
    def step(self, work: SampleWork) -> Outcome:
        """Adapter after adapter."""
        clock, began = Clock(), time.perf_counter()
        drawn: dict[int, list[list[int]]] = {}
        for number in dict.fromkeys(ask.adapter for ask in work.asks):
            self._choose(number)
            indices = [i for i, ask in enumerate(work.asks) if ask.adapter == number]
            most = max(len(work.asks[i].prompt) + work.asks[i].new for i in indices)
            # Its own choice of sizes is made for a GPU: it takes most of the memory, and the time to fill it.
            sizes = ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=(work.most_rows + 1) * -(-most // PAGE), max_batch_tokens=1024
            )
            start = time.perf_counter()
            found = self._inner().generate_batch(
                [list(work.asks[i].prompt) for i in indices],
                generation_config=config(work.asks[indices[0]], max(work.asks[i].new for i in indices)),
                continuous_batching_config=sizes,
                record_timestamps=True,
                warmup=False,
            )
            for index, key in zip(indices, sorted(found, key=lambda key: int(key.rpartition("_")[2])), strict=True):
                new = work.asks[index].new
                clock.times[index, 0] = [
                    start - began + t - found[key].created_time for t in found[key].timestamps[:new]
                ]
                drawn[index] = [found[key].generated_tokens[:new]]
        return clock.outcome(drawn)

    def _inner(self) -> Any:
        return self.model.base_model.model if hasattr(self.model, "peft_config") else self.model


def config(ask: Ask, new: int) -> GenerationConfig:
    """Exactly `new` tokens; end of sequence means nothing, on no side."""
    drawn: dict[str, Any] = {"do_sample": False}
    if ask.temperature > 0:
        drawn = {"do_sample": True, "temperature": ask.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=new, num_return_sequences=ask.samples, eos_token_id=None, pad_token_id=0, **drawn
    )


def batches(work: SampleWork) -> Iterator[list[int]]:
    """Indices of asks that go together: of one adapter, in their order, as many rows as may be."""
    for number in dict.fromkeys(ask.adapter for ask in work.asks):
        batch: list[int] = []
        rows = 0
        for index, ask in enumerate(work.asks):
            if ask.adapter != number:
                continue
            if batch and rows + ask.samples > work.most_rows:
                yield batch
                batch, rows = [], 0
            batch.append(index)
            rows += ask.samples
        yield batch


def padded_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [B, L]."""
    longest = max(len(prompt) for prompt in prompts)
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Notes the time of every token that somebody asked for; the first call brings the prompt."""

    def __init__(self, clock: Clock, rows: list[tuple[int, int]], wanted: list[int], began: float) -> None:
        self._clock, self._rows, self._wanted, self._began = clock, rows, wanted, began
        self._steps = -1

    def put(self, value: Tensor) -> None:
        """One more token of every row."""
        self._steps += 1
        now = time.perf_counter() - self._began
        for row, wanted in zip(self._rows, self._wanted, strict=True):
            if 0 < self._steps <= wanted:
                self._clock.times.setdefault(row, []).append(now)

    def end(self) -> None:
        """Nothing is kept open."""
