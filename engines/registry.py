"""The engines by name. An engine's module (and the library behind it) is imported only when it is chosen.

What an engine can do stands in a module of its own beside it (`capabilities.py` in its folder), which is light: the
settings and the edge read it. Imports nothing heavy itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from engines.capabilities import Capabilities
from schemas.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from engines.base import BaseEngine
    from engines.sampling.base import SamplingEngine

ENGINES: Mapping[str, str] = {
    "torch": "engines.torch_engine.engine:TorchEngine",
    "fsdp": "engines.fsdp.engine:FsdpEngine",
    "automodel": "engines.automodel.engine:AutomodelEngine",
    "veomni": "engines.veomni.engine:VeomniEngine",
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


def capabilities(name: str) -> Capabilities:
    """What the engine of that name can do; its library is not imported. Raises `InvalidRequest` for an unknown name."""
    module = _target("engine", name, ENGINES)[0]
    folder = importlib.import_module(f"{module.rpartition('.')[0]}.capabilities")
    return cast(Capabilities, folder.CAPABILITIES)


def sampler_kind(sampler: str) -> str:
    """The name in `SAMPLERS` of a sampler that is given by its name or its address."""
    return "external" if is_address(sampler) else sampler


def get_sampler(name: str) -> type[SamplingEngine]:
    """The sampling engine of that name, or of that address. Raises as `get_engine`, but does not `check` the class:
    what has to be there depends on more than its name."""
    return cast("type[SamplingEngine]", _find("sampler", sampler_kind(name), SAMPLERS))


def is_address(sampler: str) -> bool:
    """Whether a sampler is named by its address."""
    return sampler.startswith(("http://", "https://"))


def _target(kind: str, name: str, known: Mapping[str, str]) -> tuple[str, str]:
    """Module and attribute. Raises `InvalidRequest`."""
    if name not in known:
        raise InvalidRequest(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}", field=kind)
    module, _, attribute = known[name].partition(":")
    return module, attribute


def _find(kind: str, name: str, known: Mapping[str, str]) -> object:
    module, attribute = _target(kind, name, known)
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{kind} {name!r} needs the Python package {error.name!r}, which is not installed") from error
