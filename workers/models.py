"""The open training runs of one base model, as the server process knows them; their state is on the worker."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import TinsmithError


@dataclass(slots=True)
class Model:
    """An open training run. `error` is why it cannot be used any more: never created, or lost."""

    live: bool = False
    error: TinsmithError | None = None
    seen: float = float("-inf")
    """When it was last told of an operation or answered one."""
    cut_off: frozenset[int] = frozenset()
    """Operations that were in line already in an earlier process, and are to be submitted again."""


class Models(dict[str, Model]):
    """By model id."""

    def is_live(self, model_id: str) -> bool:
        """Whether a model is open, and its state is on the worker and can be used."""
        model = self.get(model_id)
        return model is not None and model.live
