"""The served base models: names, runtimes, tokenizers.

Responsible for the allow-list of names, for giving names with one source one runtime (one copy in memory), and for
saying which tokenizer a client can load. Not responsible for what a runtime does (`workers/runtime.py`) or for making a
base model's folder (`engines/base_models.py`, inside a worker).
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.base_models import built_in_folder, describe, prepare
from schemas.errors import InvalidRequest, Unavailable
from workers.runtime_protocol import Runtime

RuntimeFactory = Callable[[str, str | None, Callable[[Sequence[str]], Awaitable[None]]], Runtime]
"""(served name, source, on_models_lost) -> a runtime that is not started."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A name that is no longer served. `last_name`: nothing else is served by its runtime."""

    runtime: Runtime
    last_name: bool
    restore: Callable[[], None]
    """Serve it again."""


class BaseModels:
    """The allow-list of base models. A name outside it never reaches a hub, a disk or a worker.

    Args:
        sources: served name -> source (local folder, hub id, or None = the built-in default).
        tokenizers: served name -> explicit tokenizer id for `get_info`.
        data_dir: where the built-in model is converted to.
        make_runtime: builds the runtime of one source.
        on_models_lost: told which training runs lost their live state.
    """

    def __init__(
        self,
        sources: Mapping[str, str | None],
        tokenizers: Mapping[str, str],
        data_dir: Path,
        make_runtime: RuntimeFactory,
        on_models_lost: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._sources = dict(sources)
        self._tokenizers = dict(tokenizers)
        self._data_dir = data_dir
        self._make_runtime = make_runtime
        self._on_models_lost = on_models_lost
        self._runtimes: dict[str, Runtime] = {}
        for name, source in self._sources.items():
            self._runtimes[name] = self.prepare(name, source)

    @property
    def names(self) -> list[str]:
        """Served names, in the order of the settings; the first is the default."""
        return list(self._sources)

    @property
    def runtimes(self) -> Mapping[str, Runtime]:
        """Served name -> runtime; names of one source map to the same object."""
        return self._runtimes

    def prepare(self, name: str, source: str | None) -> Runtime:
        """The runtime for a name that is to be served: that of another name with the same source, which may run, or a
        new one, which is not started."""
        shared = self._sharing(source)
        return shared if shared is not None else self._make_runtime(name, source, self._on_models_lost)

    def has_source(self, source: str | None) -> bool:
        """Whether a served name has this source."""
        return self._sharing(source) is not None

    def add(self, name: str, source: str | None, runtime: Runtime, tokenizer_id: str | None = None) -> None:
        """Serve another name with a runtime that `prepare` gave and that was started."""
        self._sources[name] = source
        self._runtimes[name] = runtime
        if tokenizer_id is not None:
            self._tokenizers[name] = tokenizer_id

    def remove(self, name: str) -> Removed:
        """Serve a name no longer. Its runtime goes on; the caller stops it, if no other name needs it."""
        source, tokenizer_id = self._sources.pop(name), self._tokenizers.pop(name, None)
        runtime = self._runtimes.pop(name)
        return Removed(
            runtime,
            last_name=not self.has_source(source),
            restore=lambda: self.add(name, source, runtime, tokenizer_id),
        )

    def runtime(self, name: str, *, field: str = "base_model") -> Runtime:
        """The runtime that serves `name`. Raises `InvalidRequest` on `field` for a name that is not served."""
        runtime = self._runtimes.get(name)
        if runtime is None:
            served = ", ".join(repr(served) for served in self._sources)
            raise InvalidRequest(
                f"{field} {name[:200]!r} is not served here; served: {served}", field=field, code="unknown_base_model"
            )
        return runtime

    def same_source(self, one: str, other: str) -> bool:
        """Whether two names mean the same weights (a name that is no longer served equals only itself)."""
        if one == other:
            return True
        return one in self._sources and other in self._sources and self._sources[one] == self._sources[other]

    def tokenizer_id(self, name: str, client_host: str | None, forwarded: bool) -> str:
        """What this client can give to `AutoTokenizer.from_pretrained`.

        An explicit setting wins. A local or built-in model has its tokenizer on this machine only, so a client on
        the same machine (loopback peer, nothing forwarded) gets the absolute folder; everybody else gets the name.
        A hub model's source is its hub id, whatever name it is served under.
        """
        if name in self._tokenizers:
            return self._tokenizers[name]
        source = self._sources.get(name)
        if source is not None and not Path(source).is_dir():
            return source.partition("@")[0]
        folder = self._folder(name, source)
        # The SDK cuts a tokenizer id at its first colon.
        reachable = _is_loopback(client_host) and not forwarded and ":" not in str(folder)
        return str(folder) if reachable and folder.is_dir() else name

    def architecture(self, name: str) -> str | None:
        """The architecture of a base model (`llama`), if its folder is here."""
        folder = self._folder(name, self._sources.get(name))
        try:
            return describe(folder).model_type or None
        except Unavailable:
            return None

    def folder(self, name: str) -> Path:
        """The folder of a base model that is loaded. May read a hub's cache: for a thread. Raises `Unavailable`."""
        source = self._sources.get(name)
        return self._folder(name, source) if source is None else prepare(name, source, self._data_dir)

    def _folder(self, name: str, source: str | None) -> Path:
        """The local folder of a model that does not come from the hub."""
        return built_in_folder(self._data_dir) if source is None else Path(source).resolve()

    def _sharing(self, source: str | None) -> Runtime | None:
        return next((runtime for name, runtime in self._runtimes.items() if self._sources[name] == source), None)

    def _distinct(self) -> list[Runtime]:
        return list({id(runtime): runtime for runtime in self._runtimes.values()}.values())

    async def start(self) -> None:
        """Begin loading every base model; returns at once."""
        for runtime in self._distinct():
            await runtime.start()

    async def stop(self, grace: float) -> None:
        """Drain every runtime, all within the same `grace` seconds."""
        await asyncio.gather(*(runtime.stop(grace) for runtime in self._distinct()))


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
