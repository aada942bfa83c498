"""The continuous batcher on torch: every step draws a token for each running row and reads a piece of waiting prompts.

It shares the base model with whoever trains on it; saved adapters come from their folders and never change. Requests
have room for rows and tokens; when rows outgrow the tokens, cached prefixes go first, then the youngest request is put
aside until there is room again, without a change to its numbers.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.lockstep import Alone, Lockstep
from engines.lora import AdapterWeights, Router
from engines.sampling.adapter_cache import AdapterCache
from engines.sampling.base import SampleStep, SamplingEngine
from engines.sampling.checks import check_sample, token_limit
from engines.sampling.drawing import draw_tokens
from engines.sampling.holders import AnyPass
from engines.sampling.kv import GROWTH, Holder
from engines.sampling.model_facts import ModelFacts
from engines.sampling.prefixes import PrefixCache
from engines.sampling.requests import Plan, Running
from engines.sampling.sampling_rules import LogprobKind
from engines.sampling.saved_adapters import load_for_sampling
from engines.sampling.stops import stop_rule
from engines.torch_engine.memory_errors import is_out_of_memory
from schemas.errors import Cancelled, EngineFailure, InvalidRequest, OutOfMemory, TinsmithError
from schemas.operations import Sample, SamplerLoad, SampleStats

_log = logging.getLogger(__name__)

_SCORED_CELLS = 2**25
"""Logits held at once while prompt tokens are scored (rows x vocabulary): 128 MiB in float32."""
_LOADING_PAUSE = 0.05


class TorchSampler(SamplingEngine):
    """Samples from one base model with any number of saved adapters in the same batch.

    Logprobs of sampled tokens, and their top-k, belong to log softmax(logits / T) over the whole vocabulary, before
    top-k and top-p (T = 0: at T = 1). With `sample_logprobs="plain"` they belong to log softmax(logits).

    Args:
        model: a Hugging Face causal model to which `router` is attached.
        tokenizer: decodes for stop strings; None if only token ids are used.
        max_rows: rows that draw at once; a request with more of them runs alone.
        max_tokens: tokens that all rows may hold at once, cached prefixes included.
        max_loaded_adapters: idle adapters beyond this many leave the memory.
        prefill_tokens: prompt tokens that a step reads while rows draw; None = what suits the device.
        prefix_tokens: tokens of prompts that are remembered; None = a quarter of `max_tokens`.
        aside_folder: of this sampler alone, for requests that are put aside; what an earlier process left there is
            deleted. None = a temporary folder.
        load_adapter: reads a checkpoint folder; default: PEFT folders that fit `model`.
        entropy: gives the seed of requests that have none; default: the operating system.
        lockstep: the other ranks on whose slices of the model this one depends, each with a sampler that gets the same
            calls.
    """

    def __init__(
        self,
        model: Any,
        router: Router,
        tokenizer: Any,
        *,
        max_rows: int = 64,
        max_tokens: int = 131_072,
        max_loaded_adapters: int = 16,
        sample_logprobs: LogprobKind = "tempered",
        prefill_tokens: int | None = None,
        prefix_tokens: int | None = None,
        aside_folder: Path | None = None,
        load_adapter: Callable[[Path], AdapterWeights] | None = None,
        entropy: Callable[[], int] | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        if sample_logprobs not in ("tempered", "plain"):
            raise ValueError(f"sample_logprobs is {sample_logprobs!r}; it must be 'tempered' or 'plain'")
        self._facts = ModelFacts.of(model)
        self._pass: AnyPass = self._facts.passes(model, router)
        self._tokenizer = tokenizer
        self._kind: LogprobKind = sample_logprobs
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._prefill_tokens = prefill_tokens or (256 if self._pass.device.type == "cpu" else 4096)
        self._lockstep = lockstep or Alone()
        self._entropy = entropy or self._fresh_seed
        self._adapters = AdapterCache(
            load_adapter or (lambda folder: load_for_sampling(folder, model)), max_loaded_adapters, lockstep
        )
        self._prefixes = PrefixCache(max_tokens // 4 if prefix_tokens is None else prefix_tokens)
        self._aside_folder = aside_folder or Path(tempfile.gettempdir()) / f"tinsmith-{uuid.uuid4().hex}"
        for left in self._aside_folder.glob("*.safetensors"):
            left.unlink()
        self._waiting: deque[tuple[str, Plan]] = deque()
        self._running: dict[str, Running] = {}
        """In the order in which they got room."""
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    @classmethod
    def check(cls) -> None:
        """torch and transformers are there wherever the base model is."""

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        """Folders of the adapters in memory, least recently used first."""
        return self._adapters.loaded

    @property
    def load(self) -> SamplerLoad:
        """See `SamplingEngine.load`."""
        running = list(self._running.values())
        return SamplerLoad(
            active=len(self._waiting) + len(running),
            waiting=len(self._waiting),
            rows=sum(len(one.alive) for one in running),
            max_rows=self._max_rows,
            tokens=self._held(),
            max_tokens=self._max_tokens,
            prefix_tokens=self._prefixes.tokens,
            preempted=sum(_is_aside(one) for one in running),
        )

    def take_stats(self) -> SampleStats:
        """See `SamplingEngine.take_stats`."""
        counts, self._counts = self._counts, Counter()
        seconds, self._seconds = self._seconds, 0.0
        return SampleStats(counts["prompt"], counts["cached"], counts["drawn"], counts["steps"], seconds)

    # -- in and out ----------------------------------------------------------------------------------------------
    def add(self, request_id: str, sample: Sample) -> None:
        """See `SamplingEngine.add`. Raises `InvalidRequest` also for what cannot fit even alone."""
        plan = self._plan(sample)
        needed = sample.num_samples * -(-(plan.length + plan.limit) // GROWTH) * GROWTH
        if needed > self._max_tokens:
            raise InvalidRequest(
                f"num_samples {sample.num_samples} of up to {plan.length + plan.limit} tokens (prompt and max_tokens) "
                f"may need room for {needed} tokens; this server has room for {self._max_tokens}",
                field="num_samples",
                hint="ask for fewer samples at a time, or give a smaller max_tokens",
                code="sample_too_large",
            )
        if sample.adapter_folder is not None:
            self._adapters.ask(sample.adapter_folder)
        self._waiting.append((request_id, plan))

    def cancel(self, request_id: str) -> Cancelled | None:
        """See `SamplingEngine.cancel`."""
        running = self._running.get(request_id)
        if running is not None:
            self._leave(request_id)
            return running.cancelled()
        if all(name != request_id for name, _ in self._waiting):
            return None
        asked = {plan.request.adapter_folder for name, plan in self._waiting if name == request_id}
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
        for folder in asked - {plan.request.adapter_folder for _, plan in self._waiting}:
            if folder is not None:
                self._adapters.forget(folder)
        return Cancelled()

    def _plan(self, request: Sample) -> Plan:
        check_sample(request, self._facts.vocab_size)
        params = request.params
        limit = token_limit(len(request.prompt), params.max_tokens, self._facts.context_length)
        seed = self._entropy() if params.seed is None else params.seed
        stop = stop_rule(
            params.stop,
            eos_token_ids=self._facts.eos_token_ids,
            vocab_size=self._facts.vocab_size,
            tokenizer=self._tokenizer,
            last_prompt_token=int(request.prompt[-1]),
        )
        return Plan(request, limit, seed, stop)

    def _fresh_seed(self) -> int:
        """Of the operating system's (rank 0's, where there are several); 248 bits."""
        seed = 0
        for part in self._lockstep.first([secrets.randbits(62) for _ in range(4)]):
            seed = seed << 62 | part
        return seed

    def _leave(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is None:
            return
        running.holder.free()
        folder = running.plan.request.adapter_folder
        if folder is not None:
            self._adapters.release(folder)

    # -- a step --------------------------------------------------------------------------------------------------
    def _in_time(self, deadline: float) -> bool:
        return bool(self._lockstep.first([super()._in_time(deadline)])[0])

    def step(self) -> SampleStep:
        """See `SamplingEngine.step`."""
        began = time.perf_counter()
        result = SampleStep()
        try:
            with torch.inference_mode():
                self._draw(result)
                self._admit(result)
                work = self._work(self._make_room(result))
                for running, logits in self._run(work, result):
                    self._take(running, logits, result)
        except Exception as error:
            self._lockstep.broken(error)
            raise
        if not work and not result.ended and self._waiting:
            self._adapters.wait(_LOADING_PAUSE)
        self._counts["steps"] += 1
        self._seconds += time.perf_counter() - began
        return result

    def _draw(self, result: SampleStep) -> None:
        """Draw for whoever has logits; finished rows leave, finished requests end."""
        ready = [running for running in self._running.values() if running.logits is not None]
        if not ready:
            return
        for request_id, error in draw_tokens(ready, self._kind, self._lockstep).items():
            self._end(request_id, error, result)
        for running in ready:
            if running.request_id not in self._running:
                continue
            self._counts["drawn"] += len(running.alive)
            if running.plan.request.stream:
                result.deltas.setdefault(running.request_id, []).extend(row.newest() for row in running.alive)
            running.let_go()
            if not running.alive:
                self._end(running.request_id, running.result(), result)

    def _end(self, request_id: str, outcome: Any, result: SampleStep) -> None:
        result.ended[request_id] = outcome
        self._leave(request_id)

    # -- room ----------------------------------------------------------------------------------------------------
    def _held(self) -> int:
        return sum(running.holder.tokens for running in self._running.values())

    def _admit(self, result: SampleStep) -> None:
        """Give room to waiting requests in their order; one whose adapter is still being read lets others by."""
        if any(_is_aside(running) for running in self._running.values()):
            return  # those were here before
        rows = sum(len(running.alive) for running in self._running.values())
        # What rows will need is not known; a reserve of one block each keeps newcomers from being put aside at once.
        tokens = sum(running.holder.needed(GROWTH) for running in self._running.values())
        passed: list[tuple[str, Plan]] = []
        while self._waiting:
            request_id, plan = self._waiting.popleft()
            samples = plan.request.num_samples
            needed = self._needed(plan)
            full = rows + samples > self._max_rows or tokens + needed > self._max_tokens
            if full and (rows or self._running):
                passed.append((request_id, plan))
                break
            folder = plan.request.adapter_folder
            if folder is not None and not self._adapters.ask(folder):
                passed.append((request_id, plan))
                continue
            try:
                self._open(request_id, plan)
            except TinsmithError as error:
                result.ended[request_id] = error
                continue
            rows, tokens = rows + samples, tokens + needed
        self._waiting.extendleft(reversed(passed))

    def _needed(self, plan: Plan) -> int:
        """Tokens that a request takes soon; all that it may ever take where nobody can be put aside."""
        new = plan.limit if not self._pass.shares else min(plan.limit, GROWTH)
        return plan.request.num_samples * -(-(plan.length + new) // GROWTH) * GROWTH

    def _open(self, request_id: str, plan: Plan) -> None:
        request = plan.request
        adapter = None if request.adapter_folder is None else self._adapters.acquire(request.adapter_folder)
        running = Running.of(request_id, plan, adapter, self._pass.open())
        self._running[request_id] = running
        # The last token's logits are needed, and those of whatever is scored.
        usable = min(plan.length - 1, running.scores.first_row)
        if isinstance(running.holder, Holder):
            running.cached = self._prefixes.fill(
                running.holder, request.prompt, usable, request.cache_domain, request.adapter_folder or ""
            )
            running.position = running.cached
            self._counts["cached"] += running.cached

    def _make_room(self, result: SampleStep) -> set[str]:
        """See that everybody can grow: forget prefixes, put the youngest aside, or bring some back.

        Returns the requests that have nothing to put aside yet, and must not begin in this step. A request whose file
        cannot be written or read fails alone.
        """
        held_back: set[str] = set()
        if not self._pass.shares:
            return held_back
        running = [one for one in self._running.values() if not _is_aside(one)]
        wanted = sum(self._growing(one) for one in running)
        while wanted > self._max_tokens and len(running) > 1:
            youngest = running.pop()
            wanted -= self._growing(youngest)
            if youngest.holder.tokens and isinstance(youngest.holder, Holder):
                self._move(youngest, self._put_aside, result)
            else:
                held_back.add(youngest.request_id)
        for one in list(self._running.values()):
            if isinstance(one.holder, Holder) and one.holder.aside:
                if wanted + self._growing(one) > self._max_tokens:
                    break
                if self._move(one, Holder.bring_back, result):
                    wanted += self._growing(one)
        self._prefixes.drop(-(-(wanted + self._prefixes.tokens - self._max_tokens) // GROWTH))
        return held_back

    def _put_aside(self, holder: Holder) -> None:
        self._aside_folder.mkdir(parents=True, exist_ok=True)
        holder.put_aside(self._aside_folder / f"{uuid.uuid4().hex}.safetensors")

    def _move(self, running: Running, move: Callable[[Holder], None], result: SampleStep) -> bool:
        """Between memory and file; whether that worked."""
        assert isinstance(running.holder, Holder)
        failed = False
        try:
            move(running.holder)
        except Exception:
            _log.exception("a request could not be put aside or brought back")
            failed = True
        if self._lockstep.any(failed):
            error = EngineFailure(
                "the server had no room for this sample beside others, and could not set it aside on its disk",
                hint="try again; the server's administrator should look at the disk of its data folder",
            )
            self._end(running.request_id, error, result)
            return False
        return True

    def _growing(self, running: Running) -> int:
        """Tokens that a request takes in the coming pass."""
        if not running.reading:
            return running.holder.needed(1)
        return running.plan.request.num_samples * -(-(running.plan.length + 1) // GROWTH) * GROWTH

    # -- passes --------------------------------------------------------------------------------------------------
    def _work(self, held_back: set[str]) -> list[tuple[Running, Tensor, int]]:
        """The new tokens [rows, n] of this step and how many logits of each row are wanted."""
        here = [one for one in self._running.values() if not _is_aside(one) and one.request_id not in held_back]
        drawing = [running for running in here if not running.reading]
        work = [(running, torch.tensor([[row.tokens[-1]] for row in running.alive]), 1) for running in drawing]
        budget = self._prefill_tokens if drawing else 4 * self._prefill_tokens
        for running in here:
            if budget <= 0:
                break
            if running.reading:
                piece = self._piece(running, budget)
                budget -= piece[1].shape[1]
                work.append(piece)
        return sorted(work, key=lambda entry: entry[0].plan.request.adapter_folder or "")

    def _piece(self, running: Running, budget: int) -> tuple[Running, Tensor, int]:
        """The next piece of a prompt, on the grid of blocks; whole where the cache takes no pieces."""
        start, length, first_row = running.position, running.plan.length, running.scores.first_row
        stop = length
        if self._pass.shares:
            most = max(budget, GROWTH)
            if first_row < length - 1:
                most = min(most, max(_SCORED_CELLS // self._facts.vocab_size, GROWTH))
            stop = min(length, (start + most) // GROWTH * GROWTH)
        keep = max(0, stop - max(first_row, start))
        tokens = np.ascontiguousarray(running.plan.request.prompt[start:stop], dtype=np.int64)
        return running, torch.from_numpy(tokens)[None], keep

    def _run(self, work: Sequence[tuple[Running, Tensor, int]], result: SampleStep) -> list[tuple[Running, Tensor]]:
        """One pass. If it fails, every request is tried alone, so that only the one at fault is lost."""
        if not work:
            return []
        groups = [work] if self._pass.shares else [[entry] for entry in work]
        done: list[tuple[Running, Tensor]] = []
        for group in groups:
            try:
                spans = [(running.holder, tokens, keep, running.adapter) for running, tokens, keep in group]
                logits = self._pass.run_spans(spans)
            except Exception as error:
                self._lockstep.broken(error)
                if len(group) > 1:
                    _log.exception("a pass of %d requests failed; they are tried one by one", len(group))
                    done += [each for entry in group for each in self._run([entry], result)]
                    continue
                _log.exception("a pass of one request failed")
                self._end(group[0][0].request_id, _as_failure(error), result)
                continue
            done += [(entry[0], part) for entry, part in zip(group, logits, strict=True)]
            for running, tokens, _ in group:
                if running.reading:
                    running.position += tokens.shape[1]
                    self._counts["prompt"] += tokens.shape[1]
        return done

    def _take(self, running: Running, logits: Tensor, result: SampleStep) -> None:
        """Logits [rows, keep, V] of a request: scores of its prompt, or what its rows draw from next."""
        if running.alive[0].tokens:
            running.logits = logits[:, -1]
            return
        try:
            if logits.shape[1]:
                running.scores.add(running.position - logits.shape[1], logits[0])
            if running.reading:
                return
            request = running.plan.request
            if isinstance(running.holder, Holder):
                self._prefixes.keep(running.holder, request.prompt, request.cache_domain, request.adapter_folder or "")
            if request.num_samples > 1:
                running.holder.select([0] * request.num_samples)
            running.logits = logits[0, -1:].expand(request.num_samples, -1)
        except Exception as error:
            self._lockstep.broken(error)
            _log.exception("a request failed behind its prompt")
            self._end(running.request_id, _as_failure(error), result)


def _is_aside(running: Running) -> bool:
    return isinstance(running.holder, Holder) and running.holder.aside


def _as_failure(error: Exception) -> TinsmithError:
    """What a client may be told about an exception of a pass."""
    if isinstance(error, TinsmithError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory(
            "sampling this request needs more memory than the device has",
            hint="shorten the prompt, or lower max_tokens or num_samples",
        )
    return EngineFailure(f"sampling failed inside the engine ({type(error).__name__})")
