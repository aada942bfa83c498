"""One-time conversion of a GGUF file into a float32 safetensors folder, checked before it becomes visible.

The folder appears by one rename, with a marker that lists the checksum of every file: it is whole or it is not there.
Concurrent starts wait for each other on a file lock. Not responsible for where the GGUF file comes from. torch and
transformers are imported only when there is something to convert: looking at a finished folder stays cheap.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from schemas.errors import EngineFailure

MARKER = "conversion.json"
FORMAT = 1
"""Raise it when the conversion changes: folders of an older format are made anew."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PROBE = "The capital of France is Paris. Zwölf Boxkämpfer 12345 \U0001f600\n  def f(x): return x"


def converted(find_source: Callable[[], Path], folder: Path) -> Path:
    """The converted folder, made now if it is missing, incomplete, damaged or of an older format.

    Args:
        find_source: called only if a conversion is needed; gives the GGUF file or raises.
        folder: where the result lives; temporary siblings of it are removed.

    Raises whatever `find_source` raises, and `EngineFailure` if the result fails its checks.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not _intact(folder):
            source = find_source()
            for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
                shutil.rmtree(leftover)
            fresh = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
            _convert(source, fresh)
            _write_marker(fresh, source)
            _publish(fresh, folder)
    return folder


def _intact(folder: Path) -> bool:
    """Whether the marker is there, of this format, and every file has the checksum it names."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files: dict[str, str] = marker["files"] if marker["format"] == FORMAT else {}
        return bool(files) and all(_sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert(source: Path, target: Path) -> None:
    """Write model and tokenizer to `target`, read them back, and compare with what the GGUF file gives."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # A GGUF-loaded model refuses save_pretrained, so its state moves into a plain twin; tied weights are tied anew.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(loaded).__name__]
        twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # strict=False: a tied head is absent from or present in the state; the comparison below catches any real gap.
        twin.load_state_dict({k: v.float().contiguous() for k, v in loaded.state_dict().items()}, strict=False)
        twin.tie_weights()
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        twin.generation_config.eos_token_id = twin.config.eos_token_id = end
        tokenizer.eos_token = "<|im_end|>"
        if not tokenizer.chat_template:
            tokenizer.chat_template = CHATML
        twin.save_pretrained(target)
        tokenizer.save_pretrained(target)
        del twin
        saved = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True)
        check_tokenizer(AutoTokenizer.from_pretrained(target, local_files_only=True))
    ids = torch.tensor([tokenizer.encode(_PROBE)])
    with torch.inference_mode():
        gap = (loaded(ids).logits - saved(ids).logits).abs().max().item()
    if gap != 0.0:
        raise EngineFailure(f"the converted model's logits differ from the source's by up to {gap:.3g}")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `EngineFailure` unless text survives a round trip and the chat template renders ChatML.

    ChatML here means: `<|im_start|>` and `<|im_end|>` are one token each, and the latter ends a sequence.
    """
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    if tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False)) != _PROBE:
        raise EngineFailure("the converted tokenizer does not give a text back as it was")
    if tokenizer.eos_token_id != end or tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False) != [
        start,
        end,
    ]:
        raise EngineFailure("the converted tokenizer lacks single-token <|im_start|> and <|im_end|> (end of sequence)")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    if tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) != expected:
        raise EngineFailure("the converted tokenizer's chat template does not render ChatML")


def _write_marker(folder: Path, source: Path) -> None:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    marker = {
        "format": FORMAT,
        "source": {"file": source.name, "sha256": _sha256(source)},
        "versions": {name: version(name) for name in ("torch", "transformers", "gguf")},
        "files": {file.name: _sha256(file) for file in files},
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")
    for file in [*files, folder / MARKER, folder]:
        _fsync(file)


def _publish(fresh: Path, folder: Path) -> None:
    """Put the complete folder in its place; a damaged former one goes away first."""
    if folder.exists():
        shutil.rmtree(folder)
    fresh.rename(folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars in the server's log; the setting is put back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
