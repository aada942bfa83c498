"""A sampling replica: one copy of a base model that only samples, behind Ray Serve.

Inside it is a runtime as on one machine (`workers/runtime.py`): samples join the running batch between two turns,
projects share it fairly, and a worker process that dies is started again. Not responsible for which replica a sample
goes to (Serve), nor for what happens when the replica itself dies (`workers/ray/sampler_client.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ray import serve
from ray.actor import ActorHandle

from schemas.errors import TinsmithError, Unavailable
from schemas.operations import Operation, OperationResult, Sample, SampleDelta, SampleResult
from workers.local import LocalWorkerGroup
from workers.ray.sampler_options import SamplerOptions
from workers.runtime import Load, ModelRuntime
from workers.spec import WorkerSpec
from workers.tickets import Ticket

_LOOK_SECONDS = 0.05
_MOST_UNASKED = 1000


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample on its way to a replica. `request_id` is new for every attempt; `stream`: tell tokens as they come;
    `last_words`: the `LastWords` of whoever asks."""

    request_id: str
    project_id: str
    sample: Sample
    stream: bool
    last_words: ActorHandle[LastWords]


@dataclass(frozen=True, slots=True)
class Begun:
    """The sample begins to run on a replica, or begins again there."""

    replica: str


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The worker of this replica cannot be brought back: the sample is to run on another one. It is also what a replica
    says that is asked again before Serve has replaced it."""


Item = Begun | SampleDelta | SampleResult | TinsmithError | GivenBack
"""What a replica tells of a sample; one of the last three ends it."""


class LastWords:
    """An actor of whoever hands samples over: how those ended that were cut off. A stream that is cancelled brings
    nothing more, and what its sample took has to be known."""

    def __init__(self) -> None:
        self._outcomes: dict[str, asyncio.Future[SampleResult | TinsmithError]] = {}

    async def tell(self, request_id: str, outcome: SampleResult | TinsmithError) -> None:
        """A sample that was cut off has this outcome."""
        expected = self._of(request_id)
        if not expected.done():
            expected.set_result(outcome)

    async def take(self, request_id: str, seconds: float) -> SampleResult | TinsmithError | None:
        """The outcome of a sample that was cut off; None if it does not come within `seconds`."""
        try:
            return await asyncio.wait_for(self._of(request_id), seconds)
        except TimeoutError:
            return None
        finally:
            self._outcomes.pop(request_id, None)

    def _of(self, request_id: str) -> asyncio.Future[SampleResult | TinsmithError]:
        while len(self._outcomes) >= _MOST_UNASKED:  # of samples that Serve cut off, and nobody asks for
            del self._outcomes[next(iter(self._outcomes))]
        return self._outcomes.setdefault(request_id, asyncio.get_running_loop().create_future())


class SamplerReplica:
    """The deployment's class; Serve makes as many as there is work for.

    Args:
        spec: what the worker process loads; its builder makes a worker that samples.
        options: how it samples, and how long things may take.
    """

    async def __init__(self, spec: WorkerSpec, options: SamplerOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        self._spec, self._options = spec, options
        self._runtime = ModelRuntime(
            spec.model,
            LocalWorkerGroup(spec, start_timeout=options.start_timeout),
            max_sample_rows=spec.max_sample_rows,
            decode_slice=options.decode_slice,
            turn_timeout=options.turn_timeout,
            restart_limit=options.restart_limit,
            on_models_lost=_no_models,
        )
        self._replica: str = serve.get_replica_context().replica_id.unique_id
        # The engine keeps adapters by itself. This says to Serve which ones, so that it sends their samples here.
        self._note_adapter = serve.multiplexed(max_num_models_per_replica=spec.max_loaded_adapters)(_adapter)
        self._telling: set[asyncio.Task[None]] = set()
        await self._runtime.start()
        while self._runtime.state == "starting":  # noqa: ASYNC110 (nothing tells of the end of a start)
            await asyncio.sleep(_LOOK_SECONDS)
        self.check_health()

    def spec(self) -> tuple[WorkerSpec, SamplerOptions]:
        """What this replica was made for."""
        return self._spec, self._options

    def check_health(self) -> None:
        """For Serve, which replaces a replica that raises here: its worker cannot be brought back."""
        if self._runtime.state == "failed":
            raise self._runtime.failure or Unavailable("the sampler has failed")

    def load(self) -> Load:
        """What this replica has to do now."""
        return self._runtime.load()

    async def sample(self, request: SampleRequest) -> AsyncIterator[Item]:
        """Draw a sample. When the caller is gone, or cancels, decoding stops before the next turn, and `last_words` are
        told how it ended."""
        adapter = serve.get_multiplexed_model_id()
        if adapter:
            await self._note_adapter(adapter)
        items: asyncio.Queue[Item] = asyncio.Queue()

        async def load() -> Operation:
            return request.sample

        async def done(outcome: OperationResult | TinsmithError) -> None:
            assert isinstance(outcome, SampleResult | TinsmithError)
            items.put_nowait(outcome)

        ticket = Ticket(
            request.request_id,
            request.project_id,
            None,
            None,
            load,
            done,
            started=lambda: items.put_nowait(Begun(self._replica)),
            progress=items.put_nowait if request.stream else None,
        )
        self._runtime.submit(ticket)
        item: Item | None = None
        try:
            while True:
                item = await items.get()
                if isinstance(item, Unavailable) and self._runtime.state == "failed":
                    item = GivenBack()
                yield item
                if isinstance(item, SampleResult | TinsmithError | GivenBack):
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self._runtime.cancel(request.request_id)
            telling = asyncio.create_task(_tell(request, item, items))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            raise


async def _tell(request: SampleRequest, item: Item | None, items: asyncio.Queue[Item]) -> None:
    """Tell how a sample ended whose stream was cut off; `item` is the last one that was taken from `items`."""
    while not isinstance(item, SampleResult | TinsmithError):
        if isinstance(item, GivenBack):
            return
        item = await items.get()
    await request.last_words.tell.remote(request.request_id, item)


async def _adapter(adapter: str) -> str:
    """The engine loads it with the first sample; there is nothing to do before."""
    return adapter


async def _no_models(lost: Sequence[str]) -> None:
    """A sampler has no training runs to lose."""
