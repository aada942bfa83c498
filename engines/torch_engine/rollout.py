"""The rollout engine on torch: checks sample requests against the model and starts generations over it.

Shares the base model with the training engine; saved adapters are loaded from their folders and never change.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engines.lora import AdapterWeights, Router
from engines.rollout import RolloutEngine
from engines.torch_engine.adapter_cache import AdapterCache
from engines.torch_engine.generation import Plan, TorchGeneration
from engines.torch_engine.model_pass import ModelPass
from engines.torch_engine.sampling_rules import LogprobKind
from engines.torch_engine.saved_adapters import load_for_sampling
from engines.torch_engine.stops import stop_rule
from schemas.errors import InvalidRequest, TinsmithError
from schemas.operations import Sample, SamplingParams


class TorchRollout(RolloutEngine):
    """Samples from one base model with any number of saved adapters in the same batch.

    Logprobs of sampled tokens, and their top-k, belong to log softmax(logits / T) over the whole vocabulary, before
    top-k and top-p (T = 0: at T = 1). With `sample_logprobs="plain"` they belong to log softmax(logits).

    Args:
        model: a Hugging Face causal model to which `router` is attached.
        tokenizer: decodes for stop strings; None if only token ids are used.
        max_loaded_adapters: idle adapters beyond this many leave the memory.
        prefill_tokens: about how many prompt tokens each `step` reads before it decodes; a bound on how long training
            waits for a step. None = 1024 on the CPU, 16384 on a GPU.
        load_adapter: reads a checkpoint folder; default: PEFT folders that fit `model`.
        entropy: gives the seed of requests that have none; default: the operating system.
    """

    def __init__(
        self,
        model: Any,
        router: Router,
        tokenizer: Any,
        *,
        max_loaded_adapters: int = 16,
        sample_logprobs: LogprobKind = "tempered",
        prefill_tokens: int | None = None,
        load_adapter: Callable[[Path], AdapterWeights] | None = None,
        entropy: Callable[[], int] | None = None,
    ) -> None:
        if sample_logprobs not in ("tempered", "plain"):
            raise ValueError(f"sample_logprobs is {sample_logprobs!r}; it must be 'tempered' or 'plain'")
        self._pass = ModelPass(model, router)
        self._tokenizer = tokenizer
        self._kind: LogprobKind = sample_logprobs
        self._prefill_tokens = prefill_tokens or (1024 if self._pass.device.type == "cpu" else 16384)
        self._entropy = entropy or (lambda: secrets.randbits(256))
        self._adapters = AdapterCache(
            load_adapter or (lambda folder: load_for_sampling(folder, model)), max_loaded_adapters
        )

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        """Folders of the adapters in memory, least recently used first."""
        return self._adapters.loaded

    def start(self, requests: Mapping[str, Sample]) -> TorchGeneration:
        """Begin a batch; nothing is computed before its first `step`, which also returns what was refused here."""
        plans: dict[str, Plan | TinsmithError] = {}
        for name, request in requests.items():
            try:
                plans[name] = self._plan(request)
            except TinsmithError as error:
                plans[name] = error
        return TorchGeneration(
            plans,
            self._pass,
            self._adapters,
            sample_logprobs=self._kind,
            prefill_tokens=self._prefill_tokens,
        )

    def _plan(self, request: Sample) -> Plan:
        """Check one request. Raises `InvalidRequest` that names the field, the value and what would be accepted."""
        vocabulary, params = self._pass.vocab_size, request.params
        if len(request.prompt) == 0:
            raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
        _check_ids(request.prompt, 0, vocabulary, "prompt")
        _check_params(params)
        _check_counts(request, vocabulary)
        seed = self._entropy() if params.seed is None else params.seed
        stop = stop_rule(
            params.stop,
            eos_token_ids=self._pass.eos_token_ids,
            vocab_size=vocabulary,
            tokenizer=self._tokenizer,
            last_prompt_token=int(request.prompt[-1]),
        )
        return Plan(request, self._limit(len(request.prompt), params.max_tokens), seed, stop)

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        context = self._pass.context_length
        if prompt + (1 if max_tokens is None else max_tokens) > context:
            wanted = "at least 1 new token" if max_tokens is None else f"max_tokens {max_tokens}"
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; with {wanted} it exceeds the context of {context} tokens",
                field="prompt" if prompt >= context else "sampling_params.max_tokens",
                hint=f"shorten the prompt, or ask for at most {context - prompt} tokens" if prompt < context else None,
            )
        return context - prompt if max_tokens is None else max_tokens


def _check_params(params: SamplingParams) -> None:
    checks = (
        (
            "temperature",
            params.temperature,
            math.isfinite(params.temperature) and params.temperature >= 0,
            "0 or a positive finite number",
        ),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k, params.top_k >= -1, "positive, or -1 or 0 for off"),
        ("max_tokens", params.max_tokens, params.max_tokens is None or params.max_tokens >= 1, "at least 1"),
        ("seed", params.seed, params.seed is None or params.seed >= 0, "0 or positive"),
    )
    for name, value, good, accepted in checks:
        if not good:
            raise InvalidRequest(f"{name} is {value}; it must be {accepted}", field=f"sampling_params.{name}")


def _check_counts(request: Sample, vocabulary: int) -> None:
    if request.num_samples < 1:
        raise InvalidRequest(f"num_samples is {request.num_samples}; it must be at least 1", field="num_samples")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        value = getattr(request, name)
        if not 0 <= value <= vocabulary:
            raise InvalidRequest(f"{name} is {value}; it must be 0 to {vocabulary} (the vocabulary)", field=name)
    scored = len(request.prompt) - 1
    last_n = request.prompt_logprobs_last_n
    if last_n is not None:
        if not (request.prompt_logprobs or request.topk_prompt_logprobs):
            raise InvalidRequest("prompt_logprobs_last_n needs prompt_logprobs", field="prompt_logprobs_last_n")
        if not 1 <= last_n <= scored:
            raise InvalidRequest(
                f"prompt_logprobs_last_n is {last_n}; it must be 1 to {scored} (the prompt's length less 1)",
                field="prompt_logprobs_last_n",
            )
    targets = request.target_prompt_logprobs
    if targets is not None:
        if targets.ndim != 2 or len(targets) != scored:
            raise InvalidRequest(
                f"target_prompt_logprobs has shape {list(targets.shape)}; it must be [{scored}, K]",
                field="target_prompt_logprobs",
            )
        _check_ids(targets, -1, vocabulary, "target_prompt_logprobs")


def _check_ids(ids: np.ndarray[Any, Any], lowest: int, vocabulary: int, field: str) -> None:
    bad = ids[(ids < lowest) | (ids >= vocabulary)]
    if bad.size:
        raise InvalidRequest(
            f"{field} has token id {int(bad.flat[0])}; ids must be {lowest} to {vocabulary - 1}", field=field
        )
