"""The program of the vLLM process (`python -m engines.sampling.vllm.host`), run by the interpreter that has vLLM.

It loads a base model, then answers turns one by one; it ends when its input ends, so it never outlives the server.
Standard output is taken away from libraries first, so that a print cannot break the stream.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from engines.sampling.vllm.messages import (
    PICKLE_PROTOCOL,
    HostFailed,
    HostNews,
    HostOptions,
    HostReady,
    HostRow,
    HostTurn,
    PromptTurn,
    Reply,
    RowTurn,
)
from schemas.pipes import read_message

_log = logging.getLogger("tinsmith.vllm")


class Host:
    """One vLLM engine, in this very process: steps run in the thread that asks for them."""

    def __init__(self, options: HostOptions) -> None:
        import vllm
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from engines.sampling.vllm.tempering import TemperingNotes

        _leave_the_head_alone()
        self._notes = TemperingNotes
        self._drawn: dict[str, int] = {}
        """Tokens so far of each row that is in vLLM."""
        self._held: dict[str, HostRow] = {}
        self._adapted = False
        """Whether the rows that are in vLLM have adapters."""
        self._apart = options.on_cpu
        arguments: dict[str, Any] = (
            {} if options.cache_bytes is None else {"kv_cache_memory_bytes": options.cache_bytes}
        )
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.folder,
                dtype=options.dtype,
                skip_tokenizer_init=True,
                generation_config="vllm",  # nothing of the model's own sampling defaults
                max_model_len=options.context_length,
                max_num_seqs=options.max_rows,
                max_logprobs=-1,
                logprobs_mode="raw_logprobs",
                logits_processors=[TemperingNotes],
                enable_prefix_caching=True,
                enable_lora=True,
                max_loras=min(options.max_adapters, 8),
                max_cpu_loras=options.max_adapters,
                max_lora_rank=options.max_rank,
                gpu_memory_utilization=options.device_share,
                enforce_eager=options.on_cpu,
                async_scheduling=False,
                disable_log_stats=True,
                **arguments,
            )
        )
        cache = self._engine.vllm_config.cache_config
        self.ready = HostReady(vllm.__version__, int(cache.num_gpu_blocks or 0) * int(cache.block_size))

    def turn(self, turn: HostTurn) -> HostNews:
        """Forget, take in, step once."""
        for key in turn.aborted:
            self._held.pop(key, None)
        self._engine.abort_request([key for key in turn.aborted if self._drawn.pop(key, None) is not None])
        self._held |= {row.key: row for row in turn.added}
        rows = [failed for failed in map(self._add, self._admitted()) if failed is not None]
        if turn.step and self._drawn and self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            offsets = self._notes.take()
            rows += [self._news(output, offsets.get(output.request_id, {})) for output in outputs]
        return HostNews(tuple(rows))

    def _admitted(self) -> list[HostRow]:
        """The rows that may join those in vLLM, in order.

        On a CPU, vLLM 0.32 gives a row without an adapter the adapter of the last slot when another row of the same
        step has one (it indexes with -1), which is another user's. There the two kinds run one after the other; the
        first row of the other kind lets no later one pass.
        """
        rows: list[HostRow] = []
        for row in list(self._held.values()):
            adapted = row.adapter is not None
            if self._apart and (self._drawn or rows) and adapted != self._adapted:
                break
            self._adapted = adapted
            rows.append(self._held.pop(row.key))
        return rows

    def _add(self, row: HostRow) -> RowTurn | None:
        """Hand a row to vLLM; the reason if it cannot be."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        from engines.sampling.vllm.tempering import ARGUMENT

        adapter = None
        try:
            if row.adapter is not None:
                number, folder = row.adapter
                adapter = LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path=folder)
                self._engine.add_lora(adapter)  # here, so that a broken one fails this row and not the whole batch
        except Exception as error:
            _log.exception("an adapter cannot be loaded")
            return RowTurn(row.key, error=type(error).__name__, adapter_failed=True)
        params = SamplingParams(
            max_tokens=row.max_tokens,
            temperature=row.temperature,
            top_k=row.top_k,
            top_p=row.top_p,
            seed=row.seed,
            logprobs=row.topk,
            prompt_logprobs=row.prompt_topk,
            flat_logprobs=True,
            ignore_eos=True,  # the worker decides where a sequence stops
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={ARGUMENT: row.key} if row.tempered else None,
        )
        prompt = TokensPrompt(prompt_token_ids=list(row.prompt))
        if row.salt:
            prompt["cache_salt"] = row.salt
        try:
            self._engine.add_request(row.key, prompt, params, lora_request=adapter)
        except Exception as error:
            _log.exception("vLLM refuses a row")
            return RowTurn(row.key, error=type(error).__name__)
        self._drawn[row.key] = 0
        return None

    def _news(self, output: Any, offsets: dict[int, float]) -> RowTurn:
        drawn = output.outputs[0]
        tokens = tuple(int(token) for token in drawn.token_ids)
        plain, topk = _per_token(drawn.logprobs, len(tokens))
        first = self._drawn.get(output.request_id, 0)
        self._drawn[output.request_id] = first + len(tokens)
        if output.finished:
            del self._drawn[output.request_id]
        prompt = None
        if output.prompt_logprobs:  # vLLM brings it once; the first token has none
            prompt = PromptTurn(*_per_token(output.prompt_logprobs, len(output.prompt_logprobs) - 1, 1))
        return RowTurn(
            key=output.request_id,
            tokens=tokens,
            plain=plain,
            topk=topk,
            offsets=tuple(offsets[first + i] for i in range(len(tokens))) if offsets else (),
            prompt=prompt,
            cached_tokens=int(output.num_cached_tokens or 0),
            finished=bool(output.finished),
        )


def _leave_the_head_alone() -> None:
    """Keep vLLM 0.32 from preparing the output head for adapters; one that has a part for it then fails to load.

    Once it has, prompts cannot be scored (it counts one row of logits per sequence), and on a CPU sequences without an
    adapter get the head of the last slot's.
    """
    from vllm.lora import model_manager

    supported = model_manager.get_supported_lora_modules
    model_manager.get_supported_lora_modules = lambda model: [
        name for name in supported(model) if name not in ("lm_head", "embed_tokens")
    ]


def _per_token(
    flat: Any, count: int, first: int = 0
) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]]:
    """Of vLLM's `FlatLogprobs`: each token's own logprob, which comes first, and the best (ids, logprobs) behind it."""
    own: list[float] = []
    best: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
    for place in range(first, first + count):
        start, stop = flat.start_indices[place], flat.end_indices[place]
        own.append(float(flat.logprobs[start]))
        best.append((tuple(flat.token_ids[start + 1 : stop]), tuple(flat.logprobs[start + 1 : stop])))
    return tuple(own), tuple(best)


def serve(requests: BinaryIO, replies: BinaryIO) -> int:
    """Load, then answer turns until the input ends; returns the exit code."""

    def reply(message: Reply) -> None:
        pickle.dump(message, replies, PICKLE_PROTOCOL)
        replies.flush()

    options: HostOptions = read_message(requests)
    try:
        host = Host(options)
    except Exception as error:
        _log.exception("vLLM cannot load the base model")
        reply(HostFailed(_reason(error)))
        return 1
    reply(host.ready)
    while True:
        try:
            turn: HostTurn = read_message(requests)
        except EOFError:
            return 0
        try:
            news = host.turn(turn)
        except Exception as error:  # vLLM says nothing of the state that it is in now
            _log.exception("a step of vLLM failed")
            reply(HostFailed(type(error).__name__))
            return 1
        reply(news)


def _reason(error: BaseException) -> str:
    """The class of an error, with its first line where it is vLLM's own word on the configuration."""
    text = str(error).strip().splitlines()
    short = isinstance(error, ValueError | NotImplementedError) and text and "/" not in text[0]
    return f"{type(error).__name__}: {text[0][:300]}" if short else type(error).__name__


def main(argv: Sequence[str] = ()) -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        code = serve(requests, replies)
    except (BrokenPipeError, EOFError):
        code = 0
    except Exception:
        _log.exception("this process cannot go on")
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # vLLM's threads need not end by themselves


if __name__ == "__main__":
    main()
