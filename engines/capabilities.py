"""What an engine can do, declared beside its class, so that what it cannot is refused before any work.

Imports nothing heavy: the settings, the edge and the documentation read it without the engine's library. Not
responsible for what a base model can take (`schemas.base_model_info.BaseModelInfo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of one engine.

    Args:
        engine: its name in `engines.registry.ENGINES`.
        devices: kinds of devices that it computes on (`cpu`, `cuda`).
        several_ranks: a base model may be computed by several processes.
        many_adapters: datums of different adapters share a pass through the base model.
        packed: several datums share a row of a pass, where the model and the machine allow it.
        tensor_parallel: it can split single weights over ranks.
        pipeline_parallel: it can split the layers over ranks.
        optimizers: optimizers of a training run.
        modalities: what datums and prompts may hold.
        samplers: kinds of samplers that can run beside it (`engines.registry.SAMPLERS`).
        environment: name of the environment that its library lives in (`make engine-venv NAME=...`); None = the
            server's own.
    """

    engine: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    several_ranks: bool = False
    many_adapters: bool = True
    packed: bool = True
    tensor_parallel: bool = False
    pipeline_parallel: bool = False
    optimizers: tuple[str, ...] = ("adamw", "dimuon")
    modalities: tuple[str, ...] = ("text",)
    samplers: tuple[str, ...] = ("torch", "vllm", "external")
    environment: str | None = None

    def check_device(self, device: str) -> None:
        """Raise `InvalidRequest` for a kind of device that the engine does not compute on; `auto` is fine."""
        if device != "auto":
            self._accept("device", device.partition(":")[0], ("auto", *self.devices))

    def check_ranks(self, ranks: int) -> None:
        """Raise `InvalidRequest` for more ranks than the engine can have."""
        if ranks > 1 and not self.several_ranks:
            raise InvalidRequest(
                f"ranks is {ranks}; engine {self.engine!r} computes in one process and accepts: 1", field="ranks"
            )

    def check_sampler(self, kind: str) -> None:
        """Raise `InvalidRequest` for a sampler (a name of `engines.registry.SAMPLERS`) that cannot run beside it."""
        self._accept("sampler", kind, self.samplers)

    def check_optimizer(self, optimizer: str, field: str = "optimizer_config.type") -> None:
        """Raise `InvalidRequest` for an optimizer that the engine does not have."""
        self._accept(field, optimizer, self.optimizers)

    def _accept(self, field: str, value: str, accepted: Sequence[str]) -> None:
        if value not in accepted:
            raise InvalidRequest(
                f"{field} is {value!r}; engine {self.engine!r} accepts: {', '.join(accepted)}", field=field
            )
