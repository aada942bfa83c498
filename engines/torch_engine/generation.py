"""A running batch of samples: prompts are read once, then all rows are decoded together, token by token.

Rows of all requests share one forward pass per token, sorted by adapter; finished rows leave the batch. A request
that fails takes nobody with it. Not responsible for checking requests or for keeping adapters (`rollout`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from engines.lora import AdapterWeights
from engines.rollout import Generation
from engines.torch_engine.adapter_cache import AdapterCache
from engines.torch_engine.kv_cache import RowCache
from engines.torch_engine.model_pass import ModelPass, as_failure, segments_of
from engines.torch_engine.prompt_scores import PromptScores
from engines.torch_engine.sampling_rules import DrawRule, LogprobKind, draw, stream, tempered_logprobs
from engines.torch_engine.stops import StopRule
from schemas.errors import EngineFailure, TinsmithError
from schemas.operations import Sample, SampledSequence, SampleResult, TopK

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SCORED_CELLS = 2**25
"""Logits held at once while prompt tokens are scored (rows x vocabulary): 128 MiB in float32."""
_PREFILL_CHUNK = 512
"""Prompt positions per pass when nothing is scored. Pieces depend on the request alone, never on its company."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request with everything resolved: `limit` new tokens at most, `seed` set."""

    request: Sample
    limit: int
    seed: int
    stop: StopRule


@dataclass(eq=False, slots=True)
class Row:
    """One continuation in progress."""

    owner: Running
    draws: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[list[int], list[float]]] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None

    def take(self, token: int, logprob: float) -> None:
        """Append a token and see whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.owner.plan.stop.reached(self.tokens):
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.owner.plan.limit:
            self.stop_reason = "length"

    def result(self) -> SampledSequence:
        """The finished continuation."""
        assert self.stop_reason is not None
        topk = None
        if self.topk:
            topk = TopK(
                np.array([ids for ids, _ in self.topk], np.int32), np.array([lp for _, lp in self.topk], np.float32)
            )
        return SampledSequence(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            self.stop_reason,
            topk,
            np.array(self.plain, np.float32) if self.owner.plan.request.plain_logprobs else None,
        )


@dataclass(eq=False, slots=True)
class Running:
    """A request whose prompt has been read."""

    request_id: str
    plan: Plan
    adapter: AdapterWeights | None
    rule: DrawRule
    scores: PromptScores
    rows: list[Row] = field(default_factory=list)

    def result(self) -> SampleResult:
        """The finished request."""
        return SampleResult(
            sequences=tuple(row.result() for row in self.rows),
            prompt_logprobs=self.scores.logprobs,
            topk_prompt_logprobs=self.scores.topk,
            target_prompt_logprobs=self.scores.targets,
            prompt_alt_tokens=self.scores.alternatives,
        )


@dataclass(eq=False, slots=True)
class Reading:
    """A request whose prompt is being read: the cache holds its first `position` tokens."""

    running: Running
    cache: RowCache
    position: int = 0


@dataclass(eq=False, slots=True)
class Batch:
    """Rows that are decoded in one pass; `logits` [rows, V] predict each row's next token."""

    rows: list[Row]
    cache: RowCache
    logits: Tensor


class TorchGeneration(Generation):
    """See `engines.rollout.Generation`. Used by one thread; prompts are read inside `step`, some per call."""

    def __init__(
        self,
        plans: Mapping[str, Plan | TinsmithError],
        model: ModelPass,
        adapters: AdapterCache,
        *,
        sample_logprobs: LogprobKind,
        prefill_tokens: int,
    ) -> None:
        self._waiting = {name: plan for name, plan in plans.items() if isinstance(plan, Plan)}
        self._ended: dict[str, SampleResult | TinsmithError] = {
            name: plan for name, plan in plans.items() if isinstance(plan, TinsmithError)
        }
        self._running: dict[str, Running] = {}
        self._reading: Reading | None = None
        self._batches: list[Batch] = []
        self._model = model
        self._adapters = adapters
        self._kind = sample_logprobs
        self._prefill_tokens = prefill_tokens

    @property
    def active(self) -> Sequence[str]:
        """Requests not yet returned by `step`."""
        return [*self._ended, *self._running, *self._waiting]

    def step(self, tokens: int) -> Mapping[str, SampleResult | TinsmithError]:
        """Read waiting prompts (about a token budget of them), then decode up to `tokens` tokens per row."""
        with torch.inference_mode():
            self._admit()
            for _ in range(tokens):
                if not self._batches:
                    break
                self._batches = [rest for batch in self._batches for rest in self._advance(batch)]
        ended, self._ended = self._ended, {}
        return ended

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its rows; unknown or finished ids are ignored."""
        self._waiting.pop(request_id, None)
        self._ended.pop(request_id, None)
        running = self._running.pop(request_id, None)
        if running is not None:
            self._leave(running)
            with torch.inference_mode():
                self._batches = [b for batch in self._batches for b in self._without(batch, {running})]

    # -- reading prompts ------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        budget = self._prefill_tokens
        fresh: list[Batch] = []
        while budget > 0 and (self._reading or self._waiting):
            if self._reading is None:
                name = next(iter(self._waiting))
                self._reading = self._guarded(name, partial(self._open, name, self._waiting.pop(name)))
                continue
            reading, before = self._reading, self._reading.position
            batch = self._guarded(reading.running.request_id, partial(self._read_piece, reading))
            budget -= max(reading.position - before, 1)
            if batch is not None:
                fresh.append(batch)
                self._reading = None
        if fresh:
            self._batches = self._grouped([*self._batches, *fresh])

    def _open(self, name: str, plan: Plan) -> Reading:
        request, params = plan.request, plan.request.params
        scores = PromptScores(request, stream(plan.seed, "alternatives"))
        rule = DrawRule(params.temperature, params.top_k, params.top_p)
        adapter = None if request.adapter_folder is None else self._adapters.acquire(request.adapter_folder)
        running = Running(name, plan, adapter, rule, scores)
        running.rows = [Row(running, stream(plan.seed, i)) for i in range(request.num_samples)]
        self._running[name] = running
        return Reading(running, RowCache.empty(plain=self._model.plain))

    def _read_piece(self, reading: Reading) -> Batch | None:
        """Run the next piece of the prompt and score it; behind the last piece, the rows that are to be decoded."""
        running, request = reading.running, reading.running.plan.request
        length, first_row = len(request.prompt), running.scores.first_row
        piece = length
        if self._model.plain:  # other caches do not all take a prompt in pieces
            piece = _PREFILL_CHUNK if first_row == length - 1 else max(_SCORED_CELLS // self._model.vocab_size, 1)
        start, stop = reading.position, min(reading.position + piece, length)
        keep = stop - min(max(first_row, start), stop - 1)
        tokens = torch.from_numpy(np.ascontiguousarray(request.prompt[start:stop], dtype=np.int64))[None]
        logits = self._model.run(tokens, reading.cache, segments_of([running.adapter]), keep)[0]
        running.scores.add(stop - keep, logits)
        reading.position = stop
        if stop < length:
            return None
        reading.cache.select([0] * request.num_samples)
        return Batch(list(running.rows), reading.cache, logits[-1:].expand(request.num_samples, -1))

    def _grouped(self, batches: list[Batch]) -> list[Batch]:
        """Join what may share a pass, rows sorted by adapter; if memory is too short for that, leave them apart."""
        if not self._model.plain:
            return batches
        groups: dict[str, list[Batch]] = {}
        for batch in batches:
            key = "" if self._model.mixes_adapters else _adapter_key(batch.rows[0])
            groups.setdefault(key, []).append(batch)
        joined: list[Batch] = []
        for group in groups.values():
            try:
                joined.append(_join(group))
            except (RuntimeError, MemoryError):
                _log.exception("batches could not be joined; they are decoded apart")
                joined.extend(group)
        return joined

    # -- decoding -------------------------------------------------------------------------------------------------
    def _advance(self, batch: Batch) -> list[Batch]:
        """Draw one token for every row, let finished and broken rows go, and run the others."""
        broken = self._draw(batch)
        for running in dict.fromkeys(row.owner for row in batch.rows):
            if running not in broken and all(row.stop_reason for row in running.rows):
                self._ended[running.request_id] = running.result()
                del self._running[running.request_id]
                self._leave(running)
        return [ran for left in self._without(batch, broken) for ran in self._run(left)]

    def _draw(self, batch: Batch) -> set[Running]:
        """Returns the requests that were failed because their logits are not numbers."""
        rules = [row.owner.rule for row in batch.rows]
        logprobs = tempered_logprobs(batch.logits, [rule.temperature for rule in rules])
        asked = [row.owner.plan.request.plain_logprobs for row in batch.rows]
        plain = logprobs
        if (self._kind == "plain" or any(asked)) and any(rule.temperature not in (0.0, 1.0) for rule in rules):
            plain = tempered_logprobs(batch.logits, [1.0] * len(rules))
        reported = plain if self._kind == "plain" else logprobs
        broken: set[Running] = set()
        for row, bad in zip(batch.rows, logprobs.amax(-1).isnan().tolist(), strict=True):
            if bad and row.owner not in broken:
                broken.add(row.owner)
                self._fail(
                    row.owner.request_id,
                    EngineFailure("the model's logits are not finite with this adapter", hint="its weights are broken"),
                )
        tokens = draw(logprobs.nan_to_num(nan=0.0), rules, [row.draws.random() for row in batch.rows])
        chosen = torch.tensor(tokens, device=reported.device)[:, None]
        values = reported.gather(-1, chosen)[:, 0].tolist()
        if any(asked):
            for row, wanted, value in zip(batch.rows, asked, plain.gather(-1, chosen)[:, 0].tolist(), strict=True):
                if wanted:
                    row.plain.append(value)
        wide = max(row.owner.plan.request.topk_sample_logprobs for row in batch.rows)
        if wide:
            best, ids = (tensor.tolist() for tensor in torch.topk(reported, wide, dim=-1))
            for i, row in enumerate(batch.rows):
                k = row.owner.plan.request.topk_sample_logprobs
                if k:
                    row.topk.append((ids[i][:k], best[i][:k]))
        for row, token, value in zip(batch.rows, tokens, values, strict=True):
            row.take(token, value)
        return broken

    def _without(self, batch: Batch, gone: Iterable[Running]) -> list[Batch]:
        """The batch without finished rows and without some requests: one batch, or none."""
        leaving = set(gone)
        keep = [i for i, row in enumerate(batch.rows) if row.stop_reason is None and row.owner not in leaving]
        if not keep:
            return []
        if len(keep) < len(batch.rows):
            batch.cache.select(keep)
            batch.rows = [batch.rows[i] for i in keep]
            batch.logits = batch.logits[keep]
        return [batch]

    def _run(self, batch: Batch) -> list[Batch]:
        """One pass. If it fails, every request is tried alone, so that only the one at fault is lost."""
        try:
            self._forward(batch)
            return [batch]
        except Exception as error:
            owners = list(dict.fromkeys(row.owner for row in batch.rows))
            _log.exception("a decoding pass of %d requests failed", len(owners))
            if len(owners) == 1:
                self._fail(owners[0].request_id, as_failure(error))
                return []
        alone: list[Batch] = []
        for owner in owners:
            where = [i for i, row in enumerate(batch.rows) if row.owner is owner]
            part = self._guarded(owner.request_id, partial(_part, batch, where))
            if part is not None:
                alone.extend(self._run(part))
        return alone

    def _forward(self, batch: Batch) -> None:
        tokens = torch.tensor([[row.tokens[-1]] for row in batch.rows])
        segments = segments_of([row.owner.adapter for row in batch.rows])
        batch.logits = self._model.run(tokens, batch.cache, segments, 1)[:, -1]

    # -- endings --------------------------------------------------------------------------------------------------
    def _guarded(self, name: str, work: Callable[[], T]) -> T | None:
        """Run work that belongs to one request; whatever it raises ends that request alone."""
        try:
            return work()
        except Exception as error:
            if not isinstance(error, TinsmithError):
                _log.exception("request %s failed", name)
            self._fail(name, as_failure(error))
            return None

    def _fail(self, name: str, error: TinsmithError) -> None:
        self._ended[name] = error
        running = self._running.pop(name, None)
        if running is not None:
            self._leave(running)

    def _leave(self, running: Running) -> None:
        if self._reading is not None and self._reading.running is running:
            self._reading = None
        folder = running.plan.request.adapter_folder
        if folder is not None:
            self._adapters.release(folder)


def _part(batch: Batch, where: Sequence[int]) -> Batch:
    """A copy of some rows."""
    return Batch([batch.rows[i] for i in where], batch.cache.part(where), batch.logits[list(where)])


def _adapter_key(row: Row) -> str:
    return row.owner.plan.request.adapter_folder or ""


def _join(batches: Sequence[Batch]) -> Batch:
    rows = [row for batch in batches for row in batch.rows]
    cache = RowCache.joined([batch.cache for batch in batches])
    logits = torch.cat([batch.logits for batch in batches])
    order = sorted(range(len(rows)), key=lambda i: _adapter_key(rows[i]))
    cache.select(order)
    return Batch([rows[i] for i in order], cache, logits[order])
