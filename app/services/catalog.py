"""Base models that come and go while the server runs.

Responsible for adding one only when it really serves, for removing one only when nobody uses it, and for what a restart
finds. Not responsible for who may ask (`app/routes/admin.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from app.services.base_models import BaseModels
from app.services.runs import Runs
from schemas.errors import AlreadyExists, InvalidRequest, NotFound, Unavailable
from store import runs as run_rows
from store.added_models import AddedModel, read_added, write_added
from store.database import Store
from store.records import RunRecord
from workers.runtime_protocol import Runtime

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Served:
    """One served base model. `added`: while the server ran, and not by its settings."""

    name: str
    runtime: Runtime
    added: bool
    runs: int


class Catalog:
    """The base models of the server.

    Args:
        on_served: told the name of a base model that is served from now on, to go on with what waited for it.
        start_timeout: seconds that a base model may take from being asked for until it serves.
        grace: seconds that accepted work may take when a base model is removed.
    """

    def __init__(
        self,
        store: Store,
        models: BaseModels,
        runs: Runs,
        data_dir: Path,
        *,
        on_served: Callable[[str], Awaitable[None]],
        start_timeout: float,
        grace: float,
    ) -> None:
        self._store = store
        self._models = models
        self._runs = runs
        self._data_dir = data_dir
        self._on_served = on_served
        self._start_timeout = start_timeout
        self._grace = grace
        self._changing = asyncio.Lock()

    async def served(self) -> list[Served]:
        """Everything that is served, in the order of the settings, then of adding."""
        added = {model.name for model in await self._added()}
        counts = await self._live_runs()
        return [
            Served(name, runtime, name in added, len(counts.get(name, [])))
            for name, runtime in self._models.runtimes.items()
        ]

    async def add(self, model: AddedModel) -> Served:
        """Serve another base model; returns when it is loaded. Goes on when the caller is cancelled.

        Raises:
            AlreadyExists: the name is served.
            Unavailable: it cannot be loaded, or there is no place for it; nothing is left behind then.
        """
        return await asyncio.shield(asyncio.create_task(self._add(model)))

    async def remove(self, name: str, *, force: bool = False) -> None:
        """Serve a base model no longer. With `force` its live runs are lost; their checkpoints stay.

        Raises:
            NotFound: it is not served.
            InvalidRequest: the settings name it, or training runs on it are live and `force` is not given.
        """
        await asyncio.shield(asyncio.create_task(self._remove(name, force)))

    async def _add(self, model: AddedModel) -> Served:
        async with self._changing:
            if model.name in self._models.runtimes:
                raise AlreadyExists(f"base model {model.name!r} is served already", field="name")
            is_new = not self._models.has_source(model.source)
            runtime = self._models.prepare(model.name, model.source)
            try:
                if is_new:
                    await runtime.start()
                    await self._wait_until_ready(model.name, runtime)
                await self._record([*await self._added(), model])
            except BaseException:
                if is_new:
                    await runtime.stop(0.0)
                raise
            self._models.add(model.name, model.source, runtime, model.tokenizer_id)
            logger.info("base model %s was added", model.name)
            await self._on_served(model.name)
            return Served(model.name, runtime, True, len((await self._live_runs()).get(model.name, [])))

    async def _wait_until_ready(self, name: str, runtime: Runtime) -> None:
        try:
            async with asyncio.timeout(self._start_timeout):
                while runtime.state != "ready":
                    if runtime.failure is not None:
                        failure = runtime.failure
                        raise Unavailable(
                            f"base model {name!r} cannot be served: {failure.message}",
                            hint=failure.hint,
                            code="base_model_unavailable",
                        )
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise Unavailable(
                f"base model {name!r} was not ready within {self._start_timeout:g} s "
                f"(at the end: {runtime.progress or runtime.state})",
                code="base_model_unavailable",
            ) from None

    async def _remove(self, name: str, force: bool) -> None:
        async with self._changing:
            added = await self._added()
            if name not in self._models.runtimes:
                raise NotFound(f"base model {name[:200]!r} is not served", field="name")
            if name not in {model.name for model in added}:
                raise InvalidRequest(
                    f"base model {name!r} is one of the server's settings", field="name", hint="take it out there"
                )
            await self._refuse_if_used(name, force)
            undo = self._models.remove(name)
            try:
                await self._refuse_if_used(name, force)  # a run may have begun meanwhile; now none can
                await self._record([model for model in added if model.name != name])
            except BaseException:
                undo.restore()
                raise
            if undo.last_name:
                await undo.runtime.stop(self._grace)
            lost = [run.model_id for run in (await self._live_runs()).get(name, [])]
            if lost:
                await self._runs.mark_lost(lost)
            logger.info("base model %s was removed; %d training runs were lost with it", name, len(lost))

    async def _refuse_if_used(self, name: str, force: bool) -> None:
        runs = (await self._live_runs()).get(name, [])
        if runs and not force:
            raise InvalidRequest(
                f"{len(runs)} training runs on base model {name!r} are live",
                field="name",
                hint="wait until their sessions are over, or remove it with force: they are lost then, but for their "
                "checkpoints",
                code="base_model_in_use",
            )

    async def _live_runs(self) -> dict[str, list[RunRecord]]:
        found: dict[str, list[RunRecord]] = {}
        for run in await self._store.read(run_rows.live_runs):
            found.setdefault(run.base_model, []).append(run)
        return found

    async def _added(self) -> list[AddedModel]:
        return await asyncio.to_thread(read_added, self._data_dir)

    async def _record(self, models: list[AddedModel]) -> None:
        try:
            await asyncio.to_thread(write_added, self._data_dir, models)
        except OSError as error:
            raise Unavailable(f"the data folder cannot be written ({error.strerror})") from error
