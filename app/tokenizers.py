"""Makes a tokenizer loadable by the name of its model on a machine that cannot reach the hub.

`AutoTokenizer.from_pretrained("org/name")`, which SDK and recipes call with the name of a base model, looks into the
hub's cache before it asks the hub. Not responsible for tokenizers on the server, which workers read from the model's
folder.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


def install(name: str, folder: Path, cache: Path) -> Path:
    """Copy the tokenizer in `folder` into the hub's cache as the current version of the model `name`.

    Args:
        name: what clients call the model, `org/name`.
        folder: a model's or a tokenizer's folder; weights are not copied.
        cache: the cache of the machine whose clients shall find it (`$HF_HOME/hub`).

    Returns the folder inside the cache. Doing it again changes nothing. Raises `ValueError` if the name or the folder
    cannot be used, or if the cache has another version of that model already: what the hub gave is not replaced.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a model: expected org/name")
    files = [folder / file for file in _FILES if (folder / file).is_file()]
    if not any(file.name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt") for file in files):
        raise ValueError(f"{folder} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json or vocab.txt)")
    content = hashlib.sha1(usedforsecurity=False)
    for file in files:
        content.update(file.name.encode() + file.read_bytes())
    revision = content.hexdigest()  # the shape of a commit, which is what the cache files versions under
    entry = cache / f"models--{name.replace('/', '--')}"
    current = entry / "refs" / "main"
    if current.exists() and current.read_text().strip() != revision:
        raise ValueError(f"the cache has {name} already, in another version: {current.read_text().strip()}")
    snapshot = entry / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, snapshot / file.name)
    current.parent.mkdir(parents=True, exist_ok=True)
    current.write_text(revision)
    return snapshot
