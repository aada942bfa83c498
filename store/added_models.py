"""The base models that were added while the server ran: a small file in the data folder, so that they come back.

Not responsible for serving them, nor for those of the settings.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.errors import Unavailable
from store.files import read_private, replace_private

FILE = "base_models.json"


@dataclass(frozen=True, slots=True)
class AddedModel:
    """A base model: its name, where its files are (a folder or a hub id; None = the built-in default), and the
    tokenizer id to report, if one was given."""

    name: str
    source: str | None
    tokenizer_id: str | None = None


def read_added(data_dir: Path) -> list[AddedModel]:
    """What was added, in that order.

    Raises `Unavailable` if the file cannot be understood: to go on without what it names would leave the training runs
    on it without their base model, and the next addition would write over it.
    """
    data = read_private(data_dir / FILE)
    if data is None:
        return []
    try:
        return [AddedModel(**entry) for entry in json.loads(data)]
    except (ValueError, TypeError) as error:
        raise Unavailable(
            f"{FILE} in the data folder, which names the base models that were added, cannot be understood",
            hint="restore it from a backup; or remove it, and add the base models again: tinsmith models add",
            code="damaged_data_folder",
        ) from error


def write_added(data_dir: Path, models: list[AddedModel]) -> None:
    """Replace the file. Raises `OSError`."""
    text = json.dumps([asdict(model) for model in models], indent=2)
    replace_private(data_dir / FILE, f"{text}\n".encode())
