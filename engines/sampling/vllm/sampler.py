"""The sampling engine on vLLM: what a request is to vLLM, and what vLLM's numbers are to a request.

vLLM draws; stops, seeds and logprobs mean what `docs/numerics.md` says, and what vLLM cannot do exactly is refused by
name before it runs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engines.peft_format import read_adapter
from engines.sampling.foreign import ForeignRow, ForeignSampler, PromptNews, RowNews
from engines.sampling.sampling_rules import LogprobKind
from engines.sampling.vllm.environment import find_vllm
from engines.sampling.vllm.messages import HostOptions, HostRow, HostTurn, PromptTurn, RowTurn
from engines.sampling.vllm.process import VllmProcess
from schemas.base_model_info import BaseModelInfo
from schemas.errors import EngineFailure, InvalidRequest, TinsmithError
from schemas.operations import TopK

_log = logging.getLogger(__name__)

GIB = 1 << 30
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be set up for."""
CPU_CACHE = 2 * GIB
_KNOWN_ADAPTERS = 4096


class VllmSampler(ForeignSampler):
    """Samples with vLLM, which has its own copy of the base model, in a process of its own.

    The process starts here, and again with the next request if it was lost.

    Args:
        folder: of the base model.
        info: of the base model as the trainer holds it; vLLM takes the same dtype and context.
        tokenizer: decodes for stop strings.
        python: an interpreter that has vLLM; None = the one that `make engine-venv NAME=vllm` makes.
        max_loaded_adapters: adapters that vLLM keeps in memory.
        max_rank: the largest rank that an adapter may have.
        cache_bytes: of the key-value cache; None = 2 GiB on a CPU, on a GPU what fits within `device_share`.
        device_share: of the GPU's memory, for weights and cache together.
        threads: on a CPU.
        start_timeout: seconds that vLLM may take to load.
    """

    name: ClassVar[str] = "vllm"

    def __init__(
        self,
        folder: Path,
        info: BaseModelInfo,
        tokenizer: Any,
        *,
        python: Path | None = None,
        sample_logprobs: LogprobKind = "tempered",
        max_rows: int = 64,
        max_loaded_adapters: int = 16,
        max_rank: int = 64,
        cache_bytes: int | None = None,
        device_share: float = 0.4,
        threads: int | None = None,
        start_timeout: float = 900.0,
        entropy: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(info, tokenizer, sample_logprobs=sample_logprobs, max_rows=max_rows, entropy=entropy)
        self._environment = find_vllm(python)
        self._max_rank = next((rank for rank in RANKS if rank >= max_rank), RANKS[-1])
        on_cpu = self._environment.on_cpu
        self._options = HostOptions(
            folder=str(folder),
            dtype=info.dtype,
            context_length=info.context_length,
            max_rows=max_rows,
            max_adapters=max_loaded_adapters,
            max_rank=self._max_rank,
            on_cpu=on_cpu,
            threads=threads,
            cache_bytes=CPU_CACHE if cache_bytes is None and on_cpu else cache_bytes,
            device_share=device_share,
        )
        self._start_timeout = start_timeout
        self._adapters: OrderedDict[str, int] = OrderedDict()
        """Folder -> the number that vLLM knows it by; a number never means another folder."""
        self._next_adapter = 0
        self._added: list[HostRow] = []
        self._aborted: list[str] = []
        self._rows: dict[str, ForeignRow] = {}
        self._process: VllmProcess | None = self._start()

    @classmethod
    def check(cls) -> None:
        """See `SamplingEngine.check`; looks at the default environment."""
        find_vllm()

    @property
    def pid(self) -> int | None:
        """Of the vLLM process, if it runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the vLLM process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> VllmProcess:
        process = VllmProcess(self._environment, self._options, start_timeout=self._start_timeout)
        _log.info("vLLM %s holds %d tokens", process.ready.version, process.ready.cache_tokens)
        return process

    @property
    def _max_tokens(self) -> int:
        return 0 if self._process is None else self._process.ready.cache_tokens

    # -- rows ----------------------------------------------------------------------------------------------------------
    def _begin(self, rows: Sequence[ForeignRow]) -> None:
        if self._process is None:
            self._process = self._start()
        adapter = None
        folder = rows[0].plan.request.adapter_folder
        if folder is not None:
            adapter = (self._number_of(folder), folder)
        for row in rows:
            self._rows[row.key] = row
            self._added.append(self._host_row(row, adapter))

    def _host_row(self, row: ForeignRow, adapter: tuple[int, str] | None) -> HostRow:
        request, params = row.plan.request, row.plan.request.params
        return HostRow(
            key=row.key,
            prompt=tuple(request.prompt.tolist()),
            max_tokens=row.plan.limit,
            temperature=params.temperature,
            top_k=max(0, min(params.top_k, self._info.vocab_size)),
            top_p=params.top_p,
            seed=row.seed,
            topk=request.topk_sample_logprobs,
            prompt_topk=request.topk_prompt_logprobs if row.scores else None,
            adapter=adapter,
            salt=request.cache_domain,
            tempered=self._kind == "tempered" and params.temperature not in (0.0, 1.0),
        )

    def _number_of(self, folder: str) -> int:
        """The number of an adapter's folder. Raises `InvalidRequest` for a checkpoint that vLLM cannot apply."""
        number = self._adapters.get(folder)
        if number is None:
            spec = read_adapter(Path(folder)).spec
            if spec.train_unembed:
                raise self.refusal(
                    "the checkpoint adapts the output head (train_unembed), which sampler 'vllm' cannot apply",
                    "model_path",
                )
            if spec.rank > self._max_rank:
                raise self.refusal(
                    f"the checkpoint has rank {spec.rank}; sampler 'vllm' is set up for at most {self._max_rank}",
                    "model_path",
                )
            self._next_adapter += 1
            number = self._adapters[folder] = self._next_adapter
            if len(self._adapters) > _KNOWN_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(folder)
        return number

    def _abort(self, keys: Iterable[str]) -> None:
        wanted = {key for key in keys if self._rows.pop(key, None) is not None}
        unsent = {row.key for row in self._added} & wanted
        self._added = [row for row in self._added if row.key not in unsent]
        self._aborted.extend(wanted - unsent)

    def _advance(self) -> Sequence[RowNews]:
        turn = HostTurn(tuple(self._added), tuple(self._aborted))
        self._added, self._aborted = [], []
        try:
            if self._process is None:
                raise EngineFailure("the vLLM process is not running")
            news = self._process.exchange(turn)
        except TinsmithError:
            self._process = None
            self._rows.clear()
            raise
        return [self._news(item) for item in news.rows if item.key in self._rows]

    def _news(self, news: RowTurn) -> RowNews:
        row = self._rows[news.key]
        if news.finished or news.error:
            del self._rows[news.key]
        if news.error is not None:
            return RowNews(news.key, error=_failure(news))
        reported = [self._reported(row, logprob, news, i) for i, logprob in enumerate(news.plain)]
        topk = [
            (list(ids), [self._reported(row, logprob, news, i) for logprob in logprobs])
            for i, (ids, logprobs) in enumerate(news.topk)
        ]
        request = row.plan.request
        return RowNews(
            key=news.key,
            tokens=news.tokens,
            reported=reported,
            plain=news.plain if request.plain_logprobs else (),
            topk=topk if request.topk_sample_logprobs else (),
            prompt=None if news.prompt is None else _prompt(news.prompt, request.topk_prompt_logprobs),
            cached_tokens=news.cached_tokens,
            finished=news.finished,
        )

    @staticmethod
    def _reported(row: ForeignRow, logprob: float, news: RowTurn, place: int) -> float:
        """A plain logprob as the client gets it: of log softmax(logits / T), if its row was asked for that."""
        return logprob / row.plan.request.params.temperature + news.offsets[place] if news.offsets else logprob


def _prompt(news: PromptTurn, k: int) -> PromptNews:
    logprobs = np.array([np.nan, *news.logprobs], np.float32)
    if not k:
        return PromptNews(logprobs)
    topk = TopK(np.zeros((len(logprobs), k), np.int32), np.full((len(logprobs), k), np.nan, np.float32))
    for place, (ids, values) in enumerate(news.topk, start=1):
        topk.ids[place], topk.logprobs[place] = ids[:k], values[:k]
    return PromptNews(logprobs, topk)


def _failure(news: RowTurn) -> TinsmithError:
    if news.adapter_failed:
        return InvalidRequest(
            f"vLLM cannot load the adapter ({news.error})", field="model_path", hint="the server's log has the details"
        )
    return EngineFailure(f"vLLM refused the request ({news.error})")
