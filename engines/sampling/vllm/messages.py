"""What goes between the server's worker and the vLLM process: plain data, pickled.

Both interpreters import this file, so it needs nothing but the standard library; no arrays, for the two environments
have different versions of numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

PICKLE_PROTOCOL = 4
"""Understood by every Python that vLLM runs on."""


@dataclass(frozen=True)
class HostOptions:
    """What the vLLM process loads. `cache_bytes` None = vLLM's own choice within `device_share` of the GPU's memory.

    `on_cpu` chooses the CPU's way of running; `threads` are its compute threads (None = all).
    """

    folder: str
    dtype: str
    context_length: int
    max_rows: int
    max_adapters: int
    max_rank: int
    on_cpu: bool
    threads: int | None
    cache_bytes: int | None
    device_share: float


@dataclass(frozen=True)
class HostReady:
    """vLLM has loaded; its key-value cache holds `cache_tokens` tokens."""

    version: str
    cache_tokens: int


@dataclass(frozen=True)
class HostFailed:
    """vLLM did not load, or a step of it failed, and the process ends. `reason` is safe to show: a class name."""

    reason: str


@dataclass(frozen=True)
class HostRow:
    """One sequence to draw. `top_k` 0 = off; `topk` and `prompt_topk` are how many alternatives to report.

    `prompt_topk` None = no scores of the prompt. `adapter` is a number and the folder that it stands for. Rows with the
    same `salt` share what was computed for a common beginning. `tempered`: bring `RowTurn.offsets`.
    """

    key: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    topk: int
    prompt_topk: int | None
    adapter: tuple[int, str] | None
    salt: str
    tempered: bool


@dataclass(frozen=True)
class HostTurn:
    """Forget `aborted`, take `added` in, then do one step if `step` and anything is left to do."""

    added: tuple[HostRow, ...] = ()
    aborted: tuple[str, ...] = ()
    step: bool = True


@dataclass(frozen=True)
class PromptTurn:
    """Plain logprobs of the prompt's tokens from the second on, and per token its best (ids, logprobs)."""

    logprobs: tuple[float, ...]
    topk: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]


@dataclass(frozen=True)
class RowTurn:
    """What a step drew for one row. `plain` are logprobs at temperature 1 of the tokens, `topk` of the best ones.

    `offsets[i]` is log sum exp(logits) / T - log sum exp(logits / T): at temperature T the logprob of any token is its
    plain one / T plus that. `error` names the class of what went wrong; `adapter_failed` says that it was the adapter.
    """

    key: str
    tokens: tuple[int, ...] = ()
    plain: tuple[float, ...] = ()
    topk: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    offsets: tuple[float, ...] = ()
    prompt: PromptTurn | None = None
    cached_tokens: int = 0
    finished: bool = False
    error: str | None = None
    adapter_failed: bool = False


@dataclass(frozen=True)
class HostNews:
    """The answer to a turn."""

    rows: tuple[RowTurn, ...] = ()


Reply = HostReady | HostFailed | HostNews
