"""A data folder with something of everything in it, made by the real application on the tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.api import Api, serving

LARGE = [{"model_input": [5] * 200, "loss_fn_inputs": {"target_tokens": [6] * 200}}] * 50
"""A request whose body is kept in a file."""


def make_data_folder(data_dir: Path, model: Path) -> None:
    """Serve once, train, and save one checkpoint of each kind; blocks."""
    asyncio.run(_make(Settings(data_dir=data_dir, base_model=[f"{MODEL}={model}"], poll_hold=5.0, shutdown_grace=1.0)))


async def _make(settings: Settings) -> None:
    async with serving(settings) as api:
        await fill(api)


async def fill(api: Api) -> str:
    """Train a model and save it in every form; returns its id."""
    model = await api.model()
    await api.do("forward", model_id=model, data=LARGE, loss_fn="cross_entropy")
    await api.train(model)
    await api.do("save_weights", model_id=model, path="a")
    await api.do("save_weights_for_sampler", model_id=model, path="s")
    await api.do("save_weights_external", model_id=model, path="e")
    return model
