"""What a door needs to know of a model: which weights it names, and how its text becomes tokens.

Responsible for the names in a `model` field and for one tokenizer and chat template per base model, loaded once. Not
responsible for access: `Sampling.direct_weights` decides that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.services.base_models import BaseModels
from app.services.chat import ChatTemplate
from app.services.checkpoints import Checkpoints, path_of
from app.services.doors.tokens import TextTokens
from app.services.sampling import DirectWeights, Sampling
from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError, Unavailable
from store.records import CheckpointRecord

MAX_LISTED = 10_000
"""Most checkpoints in a list of models, newest first."""


@dataclass(frozen=True, slots=True)
class DoorModel:
    """A model that can be asked for text. `name` is what the client called it."""

    name: str
    weights: DirectWeights
    info: BaseModelInfo
    tokens: TextTokens
    chat: ChatTemplate

    @property
    def eos_texts(self) -> tuple[str, ...]:
        """The end-of-sequence tokens as text, which is how they stop a sample beside other stop strings."""
        names = (self.tokens.of(token).data.decode("utf-8", "replace") for token in self.info.eos_token_ids)
        return tuple(name for name in names if name)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that a `model` field takes. `created` is in Unix seconds; 0 = not known."""

    name: str
    created: int
    owned_by: str


class DoorModels:
    """The models of the doors, for every project."""

    def __init__(self, models: BaseModels, sampling: Sampling, checkpoints: Checkpoints) -> None:
        self._models = models
        self._sampling = sampling
        self._checkpoints = checkpoints
        self._text: dict[str, asyncio.Task[tuple[TextTokens, ChatTemplate]]] = {}

    async def open(self, project_id: str, name: str) -> DoorModel:
        """The model of this name.

        Raises:
            NotFound: no base model and no readable checkpoint of this name; another project's looks the same.
            InvalidRequest: an export, or a model without a tokenizer.
            Unavailable: its base model is still loading, or cannot be loaded.
        """
        weights = await self._sampling.direct_weights(project_id, name)
        runtime = self._models.runtime(weights.base_model)
        if runtime.info is None:
            reason = runtime.failure.message if runtime.failure is not None else "it is still loading"
            raise Unavailable(f"model {weights.base_model!r} is not ready: {reason}", hint="try again in a moment")
        tokens, chat = await self._text_of(weights.base_model)
        return DoorModel(name, weights, runtime.info, tokens, chat)

    async def listed(self, project_id: str) -> list[ListedModel]:
        """The served base models, then the project's own sampler checkpoints, newest first."""
        page, _ = await self._checkpoints.page(project_id, None, MAX_LISTED, 0)
        return [*map(_base, self._models.names), *(_saved(each) for each in page if self._usable(each))]

    async def single(self, project_id: str, name: str) -> ListedModel:
        """One of what `open` takes. Raises as `open`."""
        if name in self._models.names:
            return _base(name)
        await self._sampling.direct_weights(project_id, name)
        return _saved(await self._checkpoints.readable((project_id,), name, field="model"))

    def _usable(self, record: CheckpointRecord) -> bool:
        served = record.base_model in self._models.runtimes
        return record.kind == "sampler" and served and not self._checkpoints.expired(record)

    async def _text_of(self, base_model: str) -> tuple[TextTokens, ChatTemplate]:
        task = self._text.get(base_model)
        if task is None:
            task = self._text[base_model] = asyncio.create_task(self._load_text(base_model))
        try:
            return await asyncio.shield(task)
        except (TinsmithError, OSError, ValueError):
            self._text.pop(base_model, None)  # the folder may be whole the next time
            raise

    async def _load_text(self, base_model: str) -> tuple[TextTokens, ChatTemplate]:
        folder = await asyncio.to_thread(self._models.folder, base_model)
        return await asyncio.to_thread(lambda: (TextTokens(folder), ChatTemplate(folder)))


def _base(name: str) -> ListedModel:
    return ListedModel(name, 0, "tinsmith")


def _saved(record: CheckpointRecord) -> ListedModel:
    return ListedModel(str(path_of(record)), int(record.created_at.timestamp()), record.model_id)
