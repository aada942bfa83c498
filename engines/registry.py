"""The engines by name. An engine's module (and the library behind it) is imported only when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from engines.base import BaseEngine
from engines.sampling.base import SamplingEngine
from schemas.errors import InvalidRequest, Unavailable

ENGINES: Mapping[str, str] = {
    "torch": "engines.torch_engine.engine:TorchEngine",
    "fsdp": "engines.fsdp.engine:FsdpEngine",
    "megatron": "engines.megatron.engine:MegatronEngine",
}
"""Engine name -> "module:class"."""


SAMPLERS: Mapping[str, str] = {
    "torch": "engines.sampling.torch_sampler:TorchSampler",
    "vllm": "engines.sampling.vllm.sampler:VllmSampler",
    "external": "engines.sampling.external:ExternalSampler",
}
"""Sampling engine name -> "module:class". `external` is what an address (`http://...`) chooses."""


def get_engine(name: str) -> type[BaseEngine]:
    """The engine class of that name, usable on this machine.

    Raises `InvalidRequest` for an unknown name and `Unavailable` (saying what is missing) if its libraries are not
    installed.
    """
    engine = cast("type[BaseEngine]", _find("engine", name, ENGINES))
    engine.check()
    return engine


def get_sampler(name: str) -> type[SamplingEngine]:
    """The sampling engine of that name, or of that address. Raises as `get_engine`, but does not `check` the class:
    what has to be there depends on more than its name."""
    return cast("type[SamplingEngine]", _find("sampler", "external" if is_address(name) else name, SAMPLERS))


def is_address(sampler: str) -> bool:
    """Whether a sampler is named by its address."""
    return sampler.startswith(("http://", "https://"))


def _find(kind: str, name: str, known: Mapping[str, str]) -> object:
    target = known.get(name)
    if target is None:
        raise InvalidRequest(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}", field=kind)
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{kind} {name!r} needs the Python package {error.name!r}, which is not installed") from error
