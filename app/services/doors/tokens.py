"""Text and tokens of one base model, without transformers: the tokenizer's own file, and the bytes of every token.

Responsible for encoding prompts and for the exact bytes behind a token id, from which text is put together without
ever cutting a character. Not responsible for chat templates (`app/services/chat.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from schemas.errors import InvalidRequest

_BYTE_TOKEN_LENGTH = len("<0x00>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What a token stands for. `special` tokens have a name for people, but are no part of the text."""

    data: bytes
    special: bool = False


class TextTokens:
    """The tokenizer in a model's folder.

    Raises (on construction): `InvalidRequest` if the folder has no `tokenizer.json`, or one whose tokens are not bytes:
    such a model can be sampled by token ids only.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise _no_text("it has no tokenizer.json")
        decoder = orjson.loads(file.read_bytes()).get("decoder")
        self._byte_level = "ByteLevel" in _kinds(decoder)
        if not self._byte_level and not {"ByteFallback", "Metaspace"} & _kinds(decoder):
            raise _no_text("its tokenizer does not say which bytes a token is")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {
            number: TokenBytes(token.content.encode("utf-8"), bool(token.special)) for number, token in added.items()
        }
        self._known: dict[int, TokenBytes] = {}

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text; `special` adds what the tokenizer puts around every text (a beginning, say)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def of(self, token: int) -> TokenBytes:
        """The bytes of a token; none for an id that the tokenizer does not use."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens without special ones; bytes that are no UTF-8 become U+FFFD."""
        parts = (self.of(token) for token in tokens)
        return b"".join(part.data for part in parts if not part.special).decode("utf-8", "replace")

    def name(self, token: int) -> str:
        """A token as one text for people: a part of a character is written as its bytes."""
        data = self.of(token).data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _look_up(self, token: int) -> TokenBytes:
        added = self._added.get(token)
        if added is not None:
            return added
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return TokenBytes(b"")
        if self._byte_level:
            return TokenBytes(bytes(_BYTES_OF[symbol] for symbol in text if symbol in _BYTES_OF))
        if len(text) == _BYTE_TOKEN_LENGTH and text.startswith("<0x"):
            return TokenBytes(bytes([int(text[3:5], 16)]))
        return TokenBytes(text.replace(_SPACE, " ").encode("utf-8"))


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those inside it."""
    if not isinstance(decoder, Mapping):
        return set()
    inner = (_kinds(part) for part in decoder.get("decoders", ()))
    return {str(decoder.get("type"))}.union(*inner)


def _no_text(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model takes no text: {reason}",
        field="model",
        hint="sample it with token ids, through create_sampling_session and asample",
        code="no_tokenizer",
    )


def _byte_symbols() -> Iterator[tuple[str, int]]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    beyond = 0x100
    for byte in range(256):
        if byte in printable:
            yield chr(byte), byte
        else:
            yield chr(beyond), byte
            beyond += 1


_BYTES_OF = dict(_byte_symbols())
