"""Sampling by an OpenAI-compatible server at a URL: token ids in, token ids and logprobs out.

It needs what vLLM's server offers beyond OpenAI's: prompts as token ids, `return_token_ids`, `ignore_eos`. A server
that answers with text only is refused when the sampler connects; nothing goes through text. Not responsible for what
the other server computes: it must have the same base model, and that is the operator's word.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal

import httpx
import numpy as np

from engines.peft_format import read_adapter
from engines.sampling.foreign import ForeignRow, ForeignSampler, PromptNews, RowNews
from engines.sampling.prompt_scores import empty_topk
from engines.sampling.sampling_rules import LogprobKind
from schemas.base_model_info import BaseModelInfo
from schemas.errors import EngineFailure, InvalidRequest, TinsmithError, Unavailable
from schemas.operations import Sample

_log = logging.getLogger(__name__)

Json = dict[str, Any]
MOST_TEMPERATURE = 2.0
"""OpenAI's bound, which vLLM's server keeps as well."""
_PAUSE = 0.005
"""Seconds that a step waits for news: training on the same worker waits as long."""
_TOKEN = "token_id:"
_NEUTRAL: Json = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Named in every request, because a server may have other defaults (vLLM takes the model's own)."""


class ExternalSampler(ForeignSampler):
    """Samples from a server at `url`, which ends in `/v1`; a password in the URL is sent as the bearer key.

    Which distribution the server's logprobs belong to is found out when the sampler connects (`_Server.logprobs`);
    requests whose logprobs would mean something else are refused by name.

    Args:
        url: `http://host:port/v1`.
        model: the base model's name; the server's only model is taken if it has none of that name.
        timeout: seconds without a byte after which a request has failed.
    """

    name: ClassVar[str] = "external"

    def __init__(
        self,
        url: str,
        model: str,
        info: BaseModelInfo,
        tokenizer: Any,
        *,
        sample_logprobs: LogprobKind = "tempered",
        max_rows: int = 64,
        timeout: float = 300.0,
        entropy: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(info, tokenizer, sample_logprobs=sample_logprobs, max_rows=max_rows, entropy=entropy)
        self._news: queue.SimpleQueue[RowNews] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Of the thread's loop, and touched by it alone."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="external-sampler", daemon=True)
        self._thread.start()
        try:
            self._server = self._wait(_connect(url, model, max_rows, timeout))
        except BaseException:
            self._end_thread()
            raise

    @classmethod
    def check(cls) -> None:
        """See `SamplingEngine.check`: nothing has to be installed."""

    def close(self) -> None:
        """Drop what is under way and the connections."""
        self._wait(self._close())
        self._end_thread()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._server.client.aclose()

    # -- rows (the sampler's thread) -----------------------------------------------------------------------------------
    def _begin(self, rows: Sequence[ForeignRow]) -> None:
        request = rows[0].plan.request
        self._refuse_other_logprobs(request)
        if request.adapter_folder is not None:
            if rows[0].scores:
                raise self.refusal("prompt_logprobs of an adapter cannot be asked of an external server", "model_path")
            if read_adapter(Path(request.adapter_folder)).spec.train_unembed:
                raise self.refusal(
                    "the checkpoint adapts the output head (train_unembed), which external servers do not apply",
                    "model_path",
                )
        self._loop.call_soon_threadsafe(self._start, tuple(rows))

    def _refuse_other_logprobs(self, request: Sample) -> None:
        """Refuse a request for whose logprobs the server has another distribution than the one that was promised."""
        params = request.params
        if params.temperature > MOST_TEMPERATURE:
            raise self.refusal(
                f"temperature is {params.temperature}; external servers take at most {MOST_TEMPERATURE}",
                "sampling_params.temperature",
            )
        plain_too = request.plain_logprobs or self._kind == "plain"
        if params.temperature == 0 or (params.temperature == 1 and self._server.logprobs == "plain"):
            return
        if self._server.logprobs == "plain":
            if self._kind == "tempered":
                raise self.refusal(
                    f"temperature is {params.temperature}; this external server has logprobs at 0 and 1 only",
                    "sampling_params.temperature",
                )
        elif params.top_k > 0 or params.top_p < 1:
            raise self.refusal(
                "top_k and top_p change the logprobs of this external server",
                "sampling_params.top_k" if params.top_k > 0 else "sampling_params.top_p",
            )
        elif plain_too and params.temperature != 1:
            raise self.refusal(
                f"temperature is {params.temperature}; this external server has plain logprobs at 0 and 1 only",
                "sampling_params.temperature",
            )

    def _abort(self, keys: Iterable[str]) -> None:
        self._loop.call_soon_threadsafe(self._cancel, tuple(keys))

    def _advance(self) -> Sequence[RowNews]:
        try:
            first = self._news.get(timeout=_PAUSE)
        except queue.Empty:
            return ()
        return first, *self._arrived()

    def _arrived(self) -> Sequence[RowNews]:
        news: list[RowNews] = []
        try:
            while True:
                news.append(self._news.get_nowait())
        except queue.Empty:
            return news

    # -- rows (the loop's thread) --------------------------------------------------------------------------------------
    def _start(self, rows: Sequence[ForeignRow]) -> None:
        for row in rows:
            task = self._loop.create_task(self._run(row))
            self._tasks[row.key] = task
            task.add_done_callback(lambda _, key=row.key: self._tasks.pop(key, None))  # type: ignore[misc]

    def _cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            task = self._tasks.get(key)
            if task is not None:
                task.cancel()  # closes the connection, at which vLLM drops the sequence

    async def _run(self, row: ForeignRow) -> None:
        try:
            async with self._server.slots:
                model = await self._server.model_for(row.plan.request.adapter_folder)
                if row.scores:
                    self._news.put(RowNews(row.key, prompt=await self._server.score(row.plan.request)))
                async with aclosing(self._server.draw(row, model)) as drawn:
                    async for news in drawn:
                        self._news.put(news)
        except TinsmithError as error:
            self._news.put(RowNews(row.key, error=error))
        except Exception as error:
            _log.exception("a row of the external server failed")
            self._news.put(
                RowNews(row.key, error=EngineFailure(f"the external server failed ({type(error).__name__})"))
            )


class _Server:
    """The other server: which model it has, what its logprobs mean, and the requests that it answers."""

    def __init__(self, client: httpx.AsyncClient, model: str, slots: int) -> None:
        self.client = client
        self.model = model
        self.logprobs: Literal["plain", "processed"] = "plain"
        """Of the model itself, or of what is drawn from: after temperature, top-k and top-p."""
        self.slots = asyncio.Semaphore(slots)
        self._adapters: dict[str, str] = {}
        self._asking = asyncio.Lock()

    async def probe(self, token: int = 0) -> None:
        """Raise `Unavailable` unless the server takes and gives token ids; find out what its logprobs are."""
        body = {"model": self.model, "prompt": [token, token], "max_tokens": 1, "logprobs": 1, "seed": 1}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True, **_NEUTRAL}
        best: list[float] = []
        for temperature in (1.0, MOST_TEMPERATURE):
            try:
                answer = await self._post("completions", body | {"temperature": temperature})
            except TinsmithError as error:
                raise Unavailable(f"the external server cannot be sampled from: {error.message}") from error
            choice = answer["choices"][0]
            ids, echoed = choice.get("token_ids"), choice.get("prompt_token_ids")
            if not isinstance(ids, list) or len(ids) != 1 or echoed != [token, token]:
                raise Unavailable(
                    "the external server does not answer with token ids (return_token_ids), only with text",
                    hint="use a server that does, such as vLLM; or the server's own sampler (sampler = torch)",
                )
            try:
                best.append(max(choice["logprobs"]["top_logprobs"][0].values()))
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise Unavailable("the external server gives no logprobs (logprobs, top_logprobs)") from error
        self.logprobs = "plain" if abs(best[0] - best[1]) < 1e-3 * max(1.0, abs(best[0])) else "processed"

    # -- adapters ------------------------------------------------------------------------------------------------------
    async def model_for(self, folder: str | None) -> str:
        """The server's name of an adapter's folder: one that it has already, or that it lets us load."""
        if folder is None:
            return self.model
        async with self._asking:
            if folder not in self._adapters:
                self._adapters[folder] = await self._find(folder) or await self._load(folder)
            return self._adapters[folder]

    async def _find(self, folder: str) -> str | None:
        for entry in (await self._get("models"))["data"]:
            root = entry.get("root")
            if entry.get("parent") and isinstance(root, str) and PurePath(root) == PurePath(folder):
                return str(entry["id"])
        return None

    async def _load(self, folder: str) -> str:
        name = "tinsmith-" + hashlib.sha256(folder.encode()).hexdigest()[:16]
        response = await self.client.post("load_lora_adapter", json={"lora_name": name, "lora_path": folder})
        if response.is_success:
            return name
        _log.error("the external server does not load an adapter: %d %s", response.status_code, response.text[:500])
        raise InvalidRequest(
            "the external server does not have this adapter",
            field="model_path",
            hint="start it with --lora-modules NAME=FOLDER, or let it load adapters (VLLM_ALLOW_RUNTIME_LORA_UPDATING) "
            "from the same data folder",
        )

    # -- requests ------------------------------------------------------------------------------------------------------
    async def draw(self, row: ForeignRow, model: str) -> AsyncIterator[RowNews]:
        """News of one row, as the server streams it."""
        request, params = row.plan.request, row.plan.request.params
        k = request.topk_sample_logprobs
        body = self._body(request, model) | {
            "max_tokens": row.plan.limit,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "seed": row.seed,
            "logprobs": k,
            "stream": True,
        }
        async with self.client.stream("POST", "completions", json=body) as response:
            if not response.is_success:
                raise _refused(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                text = line.removeprefix("data:").strip()
                if not line.startswith("data:") or text == "[DONE]":
                    continue
                news = _chunk(row, json.loads(text), k)
                if news is not None:
                    yield news
        yield RowNews(row.key, finished=True)

    async def score(self, request: Sample) -> PromptNews:
        """Plain logprobs of a prompt."""
        k = request.topk_prompt_logprobs
        body = self._body(request, self.model) | {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
        rows = (await self._post("completions", body))["choices"][0].get("prompt_logprobs")
        prompt = request.prompt.tolist()
        if not isinstance(rows, list) or len(rows) != len(prompt):
            raise EngineFailure("the external server gives no logprobs of prompts (prompt_logprobs)")
        logprobs = np.full(len(prompt), np.nan, np.float32)
        topk = empty_topk(len(prompt), k) if k else None
        for place in range(1, len(prompt)):
            logprobs[place] = rows[place][str(prompt[place])]["logprob"]
            if topk is not None:
                best = sorted(rows[place].items(), key=lambda entry: -entry[1]["logprob"])[:k]
                topk.ids[place] = [int(token) for token, _ in best]
                topk.logprobs[place] = [entry["logprob"] for _, entry in best]
        return PromptNews(logprobs, topk)

    def _body(self, request: Sample, model: str) -> Json:
        body = {"model": model, "prompt": request.prompt.tolist(), "ignore_eos": True, **_NEUTRAL}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return body | ({"cache_salt": request.cache_domain} if request.cache_domain else {})

    async def _post(self, path: str, body: Json) -> Json:
        return _answer(await self.client.post(path, json=body))

    async def _get(self, path: str) -> Json:
        return _answer(await self.client.get(path))


async def _connect(url: str, model: str, slots: int, patience: float) -> _Server:
    address = httpx.URL(url)
    headers = {"Authorization": f"Bearer {address.password}"} if address.password else {}
    address = address.copy_with(username=None, password=None)
    client = httpx.AsyncClient(
        base_url=address,
        headers=headers,
        timeout=patience,
        limits=httpx.Limits(max_connections=slots + 4),
        trust_env=False,  # a proxy for the outside world has no business between the two
    )
    try:
        response = await client.get("models")
        names = [str(entry["id"]) for entry in _answer(response)["data"] if not entry.get("parent")]
        chosen = model if model in names else names[0] if len(names) == 1 else None
        if chosen is None:
            raise Unavailable(f"the external server has no model {model!r}; it has {', '.join(names[:5]) or 'none'}")
        server = _Server(client, chosen, slots)
        await server.probe()
    except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
        await client.aclose()
        raise Unavailable(
            f"the external server at {address} does not answer as an OpenAI-compatible one ({type(error).__name__})"
        ) from error
    except BaseException:
        await client.aclose()
        raise
    return server


def _answer(response: httpx.Response) -> Json:
    if not response.is_success:
        raise _refused(response.status_code, response.content)
    answer: Json = response.json()
    return answer


def _refused(status: int, body: bytes) -> TinsmithError:
    _log.error("the external server answered %d: %s", status, body[:500].decode(errors="replace"))
    if 400 <= status < 500:
        return InvalidRequest(f"the external server refused the request ({status})", hint="the log has its words")
    return EngineFailure(f"the external server failed ({status})")


def _chunk(row: ForeignRow, chunk: Json, k: int) -> RowNews | None:
    """News from one event of the stream; None if it brings no token."""
    if "error" in chunk:
        raise EngineFailure("the external server ended the stream with an error")
    choices = chunk.get("choices") or []
    tokens = choices[0].get("token_ids") if choices else None
    if not tokens:
        return None
    found = choices[0].get("logprobs") or {}
    own, top = found.get("token_logprobs") or [], found.get("top_logprobs") or []
    if len(own) != len(tokens) or (k and len(top) != len(tokens)):
        raise EngineFailure("the external server's logprobs do not fit its tokens")
    best = [sorted(entry.items(), key=lambda item: -item[1])[:k] for entry in top] if k else []
    return RowNews(
        row.key,
        tokens=tuple(int(token) for token in tokens),
        reported=own,
        plain=own if row.plan.request.plain_logprobs else (),
        topk=[([int(name.removeprefix(_TOKEN)) for name, _ in row_], [lp for _, lp in row_]) for row_ in best],
    )
