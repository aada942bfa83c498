"""The official Anthropic client against a real server."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.doors.conftest import ANSWER, CHAT, MODEL, PLAIN, PROMPT, Doors, tokens_of

GREEDY: Any = {"temperature": 0}
"""The client of the newer version has no such argument."""


@pytest.mark.parametrize("prefix", ["/anthropic/api", ""])
def test_a_message_is_answered(doors: Doors, knowing: str, prefix: str) -> None:
    client = doors.anthropic(prefix=prefix)
    message = client.messages.create(model=knowing, max_tokens=64, messages=CHAT, extra_body=GREEDY)
    [block] = message.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(tokens_of(PROMPT))
    assert usage.output_tokens == len(ANSWER.encode()) + 1


def test_a_stream_has_the_events_that_the_client_reads(doors: Doors, knowing: str) -> None:
    client = doors.anthropic()
    with client.messages.stream(model=knowing, max_tokens=64, messages=CHAT, extra_body=GREEDY) as stream:
        assert list(stream.text_stream) == list(ANSWER)
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(ANSWER.encode()) + 1
    events = [
        event.type
        for event in client.messages.create(model=knowing, max_tokens=2, messages=CHAT, extra_body=GREEDY, stream=True)
    ]
    assert events == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_stop_sequences_and_limits(doors: Doors, knowing: str) -> None:
    client = doors.anthropic()
    stopped = client.messages.create(
        model=knowing, max_tokens=64, messages=CHAT, stop_sequences=["zzz", "🙂"], extra_body=GREEDY
    )
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "Grüße "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "🙂")
    short = client.messages.create(model=knowing, max_tokens=2, messages=CHAT, extra_body=GREEDY)
    assert short.stop_reason == "max_tokens"


def test_tokens_are_counted_as_they_are_used(doors: Doors) -> None:
    client = doors.anthropic()
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    counted = client.messages.count_tokens(model=MODEL, messages=CHAT, system=system).input_tokens
    used = client.messages.create(model=MODEL, messages=CHAT, system=system, max_tokens=1).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens


def test_an_answer_can_be_sent_back(doors: Doors, knowing: str) -> None:
    client = doors.anthropic()
    first = client.messages.create(model=knowing, max_tokens=64, messages=CHAT, extra_body=GREEDY)
    messages: Any = [*CHAT, {"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    assert client.messages.create(model=knowing, max_tokens=4, messages=messages).content


def test_errors_are_what_the_client_expects(doors: Doors, knowing: str) -> None:
    client = doors.anthropic()
    with pytest.raises(anthropic.AuthenticationError):
        doors.anthropic("tml-wrong").messages.create(model=MODEL, max_tokens=1, messages=CHAT)
    for name in ("nope", knowing):
        with pytest.raises(anthropic.NotFoundError) as caught:
            doors.anthropic(doors.other_key).messages.create(model=name, max_tokens=1, messages=CHAT)
        assert f"{name!r} does not exist here" in str(caught.value)
    with pytest.raises(anthropic.BadRequestError, match="chat template"):
        client.messages.create(model=PLAIN, max_tokens=1, messages=CHAT)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens 9000"):
        client.messages.create(model=MODEL, max_tokens=9000, messages=CHAT)
