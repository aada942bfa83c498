"""Text from tokens: whole characters, stop strings, and where each token begins. Tokens of the tiny model are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.doors.text_stream import TextStream
from app.services.doors.tokens import TextTokens
from schemas.errors import InvalidRequest
from tests.support.tiny_model import write_tokenizer

END = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(where)
    return where


@pytest.fixture(scope="module")
def tokens(folder: Path) -> TextTokens:
    return TextTokens(folder)


def stream_of(tokens: TextTokens, ids: list[int], *, stops: tuple[str, ...] = (), stopped: bool = False) -> Any:
    """The pieces, the finish, and the stream."""
    stream = TextStream(tokens, stops, frozenset({END}))
    pieces = [stream.add(token, -1.0) for token in ids]
    last, finish = stream.end("stop" if stopped else "length")
    return [*pieces, last], finish, stream


@given(text=st.text(max_size=40))
def test_pieces_are_whole_characters_and_add_up(tokens: TextTokens, text: str) -> None:
    ids = tokens.encode(text, special=False)
    pieces, finish, _ = stream_of(tokens, ids)
    assert "".join(piece.text for piece in pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text
    assert [scored.token for piece in pieces for scored in piece.tokens] == ids
    assert finish == "length"


@given(data=st.binary(max_size=40))
def test_bytes_that_are_no_text_give_what_decoding_them_at_once_gives(tokens: TextTokens, data: bytes) -> None:
    ids = [token for byte in data for token in range(3, 259) if tokens.of(token).data == bytes([byte])]
    pieces, _, _ = stream_of(tokens, ids)
    assert "".join(piece.text for piece in pieces) == data.decode("utf-8", "replace") == tokens.decode(ids)


@given(text=st.text("abß🙂", max_size=30), stop=st.text("abß🙂", min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_ever_told(tokens: TextTokens, text: str, stop: str) -> None:
    pieces, finish, stream = stream_of(tokens, tokens.encode(text, special=False), stops=(stop,))
    assert "".join(piece.text for piece in pieces) == text.partition(stop)[0]
    assert (finish, stream.stopped_by) == (("stop", stop) if stop in text else ("length", None))
    told = [scored for piece in pieces for scored in piece.tokens]
    assert all(scored.start < len(text.partition(stop)[0]) for scored in told) or stop not in text


def test_text_is_held_back_only_as_long_as_it_may_be_a_stop_string(tokens: TextTokens) -> None:
    pieces, _, _ = stream_of(tokens, tokens.encode("xSTxSTOP", special=False), stops=("STOP",))
    assert [piece.text for piece in pieces] == ["x", "", "", "STx", "", "", "", "", ""]


def test_the_earliest_of_several_stop_strings_cuts(tokens: TextTokens) -> None:
    ids = tokens.encode("one two", special=False)
    stream = TextStream(tokens, ("two", "ne"), frozenset({END}))
    text = "".join(stream.add(token).text for token in ids)
    last, _ = stream.end("stop")
    assert (text + last.text, stream.stopped_by) == ("o", "ne")


def test_the_end_of_a_sequence_is_no_part_of_the_text_nor_of_its_tokens(tokens: TextTokens) -> None:
    ids = tokens.encode("ab", special=False)
    pieces, finish, _ = stream_of(tokens, [*ids, END], stopped=True)
    assert "".join(piece.text for piece in pieces) == "ab"
    assert [scored.token for piece in pieces for scored in piece.tokens] == ids
    assert finish == "eos"
    inside, _, _ = stream_of(tokens, [ids[0], END, ids[1]])
    assert [scored.token for piece in inside for scored in piece.tokens] == [ids[0], END, ids[1]]


def test_an_end_inside_a_character_shows(tokens: TextTokens) -> None:
    pieces, _, _ = stream_of(tokens, tokens.encode("a🙂", special=False)[:-1])
    assert "".join(piece.text for piece in pieces) == "a\ufffd"


def test_tokens_begin_where_their_text_begins(tokens: TextTokens) -> None:
    pieces, _, _ = stream_of(tokens, tokens.encode("aßb", special=False))
    assert [scored.start for piece in pieces for scored in piece.tokens] == [0, 1, 1, 2]


def test_tokens_have_names(tokens: TextTokens) -> None:
    ids = tokens.encode("a<|im_end|>ß", special=False)
    assert [tokens.name(token) for token in ids] == ["a", "<|im_end|>", "bytes:\\xc3", "bytes:\\x9f"]
    assert tokens.of(100_000).data == b""
    assert tokens.decode(ids) == "aß"


def test_a_tokenizer_of_sentence_pieces(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "\u2581Hi": 1, "\u2581you": 2, "<0xC3>": 3, "<0x9F>": 4, "s": 5}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    pieces, _, _ = stream_of(TextTokens(tmp_path), [1, 2, 3, 4, 5])
    assert [piece.text for piece in pieces] == [" Hi", " you", "", "ß", "s", ""]


def test_models_without_text_say_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as missing:
        TextTokens(tmp_path)
    assert missing.value.code == "no_tokenizer"
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.decoder = decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="does not say which bytes"):
        TextTokens(tmp_path)


def test_it_agrees_with_transformers(folder: Path, tokens: TextTokens) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    text = "Grüße 🙂<|im_end|> Ωμέγα\n\x00"
    assert tokens.encode(text, special=True) == reference.encode(text)
    ids = reference.encode(text)
    assert tokens.decode(ids) == reference.decode(ids, skip_special_tokens=True)
