"""The way from the edge to a base model's deployment: one application of Ray Serve for each base model.

Responsible for what the application is, and for carrying bytes. What blocks runs in a thread. Not responsible for the
application's life (`workers/ray/application.py`) or for the cluster (`workers/ray/cluster.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray import serve

from schemas.errors import EngineFailure, TinsmithError
from workers.ray.application import DEPLOY_SECONDS, ServeApplication, application_name, words
from workers.ray.deployment import ReplicaSpec, RuntimeReplica, actor_options
from workers.remote.link import LinkBroken

_log = logging.getLogger("tinsmith.ray")

_ANSWER_SECONDS = 30.0
"""A transfer to a replica that takes longer than this is repeated."""
MAX_ONGOING = 1000


class RayLink:
    """Implements `workers.remote.Link` on Ray Serve.

    Args:
        deploy_timeout: seconds in which the replica must run; it loads the base model only after that.
        replaces: see `ServeApplication`.
    """

    def __init__(
        self, spec: ReplicaSpec, *, deploy_timeout: float = DEPLOY_SECONDS, replaces: Sequence[str] = ()
    ) -> None:
        self._spec = spec
        self._model = spec.worker.model
        self._application = ServeApplication(
            application_name(self._model),
            f"base model {self._model!r}",
            made_for=spec,
            make=self._make,
            shortage=lambda: "no node takes new processes",
            patience=deploy_timeout,
            replaces=replaces,
        )
        self._handle: Any = None

    async def open(self) -> None:
        """See `Link.open`."""
        try:
            self._handle = await asyncio.to_thread(self._application.find_or_deploy)
        except TinsmithError:
            raise
        except Exception as error:
            _log.exception("base model %s cannot be deployed", self._model)
            raise EngineFailure(f"base model {self._model!r} cannot be deployed on Ray") from error

    async def events(self, hello: bytes) -> AsyncIterator[bytes]:
        """See `Link.events`."""
        answers = self._handle.options(stream=True).events.remote(hello)
        try:
            async for data in answers:
                yield data
        except Exception as error:  # Ray's errors have no common root; another try shows whether it was a passing one
            raise LinkBroken(words(error)) from error
        finally:
            answers.cancel()
        raise LinkBroken("the stream ended")

    async def send(self, frame: bytes) -> bool:
        """See `Link.send`."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                known: bool = await self._handle.send.remote(frame)
        except TimeoutError as error:
            raise LinkBroken(f"no answer within {_ANSWER_SECONDS:g} s") from error
        except Exception as error:
            raise LinkBroken(words(error)) from error
        return known

    async def lost(self) -> TinsmithError | None:
        """See `Link.lost`. An application that somebody deleted is made again."""
        try:
            if await asyncio.to_thread(self._application.overview) is None:
                self._handle = await asyncio.to_thread(self._application.find_or_deploy)
        except TinsmithError as error:
            return error
        except Exception as error:  # the controller is being replaced, or the cluster is gone: the next try shows it
            _log.warning("Ray Serve does not answer for base model %s: %s", self._model, words(error))
            await asyncio.sleep(1.0)
        return None

    async def close(self) -> None:
        """See `Link.close`."""
        if self._handle is None:
            return
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                if await self._handle.edges.remote() == 0:
                    await asyncio.to_thread(self._application.delete)
        except Exception as error:
            _log.warning("the application of base model %s stays on the cluster: %s", self._model, words(error))

    def _make(self) -> Any:
        deployment = serve.deployment(RuntimeReplica).options(
            name="runtime",
            num_replicas=1,
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options=actor_options(),
            health_check_period_s=5,
            health_check_timeout_s=30,
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=10,
        )
        return deployment.bind(self._spec)
