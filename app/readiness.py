"""Whether every base model really answers, asked of the workers themselves.

Responsible for probing, and for not probing more often than useful. Not responsible for HTTP or for starting anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from schemas.http.server import ModelState
from schemas.responses import ModelReadiness, ReadyResponse
from workers.runtime_protocol import Runtime

PROBE_SECONDS = 2.0
TRUST_SECONDS = 1.0
"""How long an answer is given again without asking the workers: anybody may call `readyz`."""


class Readiness:
    """Probes runtimes; concurrent callers share one probe.

    Args:
        runtimes: served name -> runtime (several names may share one).
        clock: monotonic seconds.
    """

    def __init__(self, runtimes: Mapping[str, Runtime], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._runtimes = runtimes
        self._clock = clock
        self._lock = asyncio.Lock()
        self._answer: tuple[float, ReadyResponse] | None = None

    async def check(self) -> ReadyResponse:
        """The state of every served name."""
        async with self._lock:
            if self._answer is not None and self._answer[0] > self._clock():
                return self._answer[1]
            served = dict(self._runtimes)  # one may be added or removed meanwhile
            distinct = list({id(runtime): runtime for runtime in served.values()}.values())
            found = await asyncio.gather(*(_probe(runtime) for runtime in distinct))
            by_runtime = {id(runtime): answer for runtime, answer in zip(distinct, found, strict=True)}
            models = []
            for name, runtime in served.items():
                state, detail = by_runtime[id(runtime)]
                models.append(ModelReadiness(model_name=name, state=state, detail=detail))
            ready = all(state == "ready" for state, _ in found)
            answer = ReadyResponse(status="ready" if ready else "not_ready", models=models)
            self._answer = (self._clock() + TRUST_SECONDS, answer)
            return answer


async def _probe(runtime: Runtime) -> tuple[ModelState, str | None]:
    """State and reason of one moment."""
    if runtime.state != "ready":
        return runtime.state, describe(runtime)
    if await runtime.probe(PROBE_SECONDS):
        return "ready", None
    return "restarting", f"the worker did not answer within {PROBE_SECONDS:g} s"


def describe(runtime: Runtime) -> str | None:
    """In words, why a runtime is not ready; None if it is."""
    if runtime.state == "ready":
        return None
    if runtime.failure is not None:
        failure = runtime.failure
        return f"{failure.message} ({failure.hint})" if failure.hint else failure.message
    doing = "loading" if runtime.state == "starting" else "restarting"
    return f"{doing}: {runtime.progress}" if runtime.progress else doing
