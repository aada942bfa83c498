"""The official OpenAI client against a real server."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.doors.conftest import ANSWER, CHAT, MODEL, PLAIN, PROMPT, Doors, tokens_of


def test_models_are_the_base_models_and_ones_own_checkpoints(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    names = [model.id for model in client.models.list()]
    assert names == [MODEL, PLAIN, knowing]
    assert client.models.retrieve(MODEL).id == MODEL
    found = client.models.retrieve(knowing)
    assert (found.id, found.owned_by) == (knowing, knowing.removeprefix("tinker://").split("/")[0])
    assert found.created > 1_700_000_000
    assert [model.id for model in doors.openai(prefix="/oai/api/v1").models.list()] == names


def test_foreign_checkpoints_look_unknown(doors: Doors, knowing: str) -> None:
    other = doors.openai(doors.other_key)
    assert [model.id for model in other.models.list()] == [MODEL, PLAIN]
    unknown = knowing.replace("knowing", "nothing")
    messages = []
    for name in (knowing, unknown):
        for call in (
            lambda name=name: other.models.retrieve(name),
            lambda name=name: other.completions.create(model=name, prompt="a"),
            lambda name=name: other.chat.completions.create(model=name, messages=CHAT),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            body: Any = caught.value.body
            assert (body["code"], body["param"]) == ("model_not_found", "model")
            messages.append(body["message"].replace(name, ""))
    assert len(set(messages)) == 1


def test_a_text_is_continued_by_the_adapter_and_not_by_the_base_model(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    known = client.completions.create(model=knowing, prompt=PROMPT, max_tokens=64, temperature=0)
    assert known.choices[0].text == ANSWER
    assert known.choices[0].finish_reason == "stop"
    usage = known.usage
    assert usage is not None
    drawn = len(ANSWER.encode()) + 1
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(tokens_of(PROMPT)), drawn)
    assert usage.total_tokens == usage.prompt_tokens + drawn
    base = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert not ANSWER.startswith(base.choices[0].text)
    assert base.choices[0].finish_reason == "length"


def test_every_form_of_prompt(doors: Doors, knowing: str) -> None:
    client, ids = doors.openai(), tokens_of(PROMPT)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer = client.completions.create(model=knowing, prompt=prompt, max_tokens=64, temperature=0)
        assert [choice.text for choice in answer.choices] == [ANSWER], prompt
    several = client.completions.create(
        model=knowing, prompt=[PROMPT, "abc", PROMPT], n=2, max_tokens=32, temperature=0
    )
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3, 4, 5]
    assert texts[0] == texts[1] == texts[4] == texts[5] == ANSWER
    assert texts[2] == texts[3] != ANSWER


def test_a_stream_is_sent_as_it_is_drawn_and_never_cuts_a_character(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    chunks = list(
        client.completions.create(
            model=knowing,
            prompt=PROMPT,
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert texts == [*ANSWER, ""], "one character at a time, the end in a chunk of its own"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * len(ANSWER) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER.encode()) + 1


def test_a_choice_that_ends_before_the_others_says_so_at_once(doors: Doors) -> None:
    stream = doors.openai().completions.create(
        model=MODEL, prompt="x", n=4, seed=3, max_tokens=120, stop=["a", "e", "Q", "7"], stream=True, logprobs=0
    )
    told = [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in stream if chunk.choices]
    ends = {index: place for place, (index, finish) in enumerate(told) if finish is not None}
    last = {index: place for place, (index, finish) in enumerate(told) if finish is None}
    assert ends.keys() == {0, 1, 2, 3}
    assert all(last[index] < ends[index] for index in ends), "nothing comes after an end"
    assert min(ends.values()) < max(last.values()), "all ends came with the last one"


def test_a_chat_is_answered(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    answer = client.chat.completions.create(model=knowing, messages=CHAT, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    deltas = list(client.chat.completions.create(model=knowing, messages=CHAT, temperature=0, stream=True))
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(delta.choices[0].delta.content or "" for delta in deltas) == ANSWER
    assert deltas[-1].choices[0].finish_reason == "stop"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    again = client.chat.completions.create(model=knowing, messages=parts, temperature=0)
    assert again.choices[0].message.content == ANSWER


def test_what_was_computed_before_is_counted_as_cached(doors: Doors) -> None:
    client = doors.openai()
    chat: Any = [{"role": "system", "content": "A long beginning, the same each time. " * 20}, *CHAT]
    usages = [client.chat.completions.create(model=MODEL, messages=chat, max_tokens=1).usage for _ in range(2)]
    cached = []
    for usage in usages:
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        assert cached[-1] < usage.prompt_tokens
    assert cached[0] == 0
    assert cached[1] > 500


def test_an_answer_can_be_sent_back(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    first = client.chat.completions.create(model=knowing, messages=CHAT, temperature=0).choices[0].message
    messages = [*CHAT, first, {"role": "user", "content": "and now?"}]
    assert client.chat.completions.create(model=knowing, messages=messages, max_tokens=4).choices[0].message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "finish"),
    [
        ("Ω", "Grüße 🙂 ", "stop"),
        (["nothing", " Ωμ"], "Grüße 🙂", "stop"),
        (["ße"], "Grü", "stop"),
        (["nothing"], ANSWER, "stop"),
        (["G"], "", "stop"),
    ],
)
def test_stop_strings_are_no_part_of_the_text(
    doors: Doors, knowing: str, stop: Any, text: str, finish: str, stream: bool
) -> None:
    client = doors.openai()
    options: Any = {"model": knowing, "messages": CHAT, "temperature": 0, "stop": stop, "max_tokens": 64}
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == finish
    else:
        answer = client.chat.completions.create(**options).choices[0]
        assert (answer.message.content, answer.finish_reason) == (text, finish)


def test_a_seed_repeats_and_samples_differ(doors: Doors) -> None:
    client = doors.openai()

    def texts(seed: int | None) -> list[str]:
        options: dict[str, Any] = {} if seed is None else {"seed": seed}
        answer = client.completions.create(model=MODEL, prompt="abc", n=3, max_tokens=12, **options)
        return [choice.text for choice in answer.choices]

    assert texts(7) == texts(7)
    assert len(set(texts(7))) == 3
    assert texts(None) != texts(None)


def test_chat_logprobs(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    options: Any = {"model": knowing, "messages": CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert bytes(byte for token in content for byte in token.bytes or ()).decode() == ANSWER
    assert content[0].token == "G"
    assert content[2].token == "bytes:\\xc3"
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob, "greedy: the likeliest was drawn"
        assert -1.0 < token.logprob < 0
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [(t.token, t.logprob, t.top_logprobs) for t in streamed] == [
        (t.token, t.logprob, t.top_logprobs) for t in content
    ]


def test_completion_logprobs_and_echo(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    answer = client.completions.create(
        model=knowing, prompt=PROMPT, max_tokens=64, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert answer.text == PROMPT + ANSWER
    found = answer.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(tokens_of(PROMPT)) + len(ANSWER.encode())
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert all(value is not None and value < 0 for value in found.token_logprobs[1:])
    assert all(2 <= len(each) <= 3 for each in found.top_logprobs[1:])
    drawn = len(ANSWER.encode())
    assert found.text_offset is not None
    assert found.text_offset[-drawn] == len(PROMPT)
    scored = client.completions.create(model=knowing, prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    choice = scored.choices[0]
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(found.token_logprobs[:-drawn], abs=1e-4, nan_ok=True)
    assert choice.logprobs.top_logprobs is None
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_the_logprobs_of_a_text_add_up_the_same_drawn_or_scored(doors: Doors, knowing: str) -> None:
    client = doors.openai()
    drawn = client.completions.create(model=knowing, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=0)
    assert drawn.choices[0].logprobs is not None
    values = drawn.choices[0].logprobs.token_logprobs or []
    ids = [*tokens_of(PROMPT), *tokens_of(ANSWER)[:8]]
    scored = client.completions.create(model=knowing, prompt=ids, max_tokens=0, logprobs=0, echo=True)
    assert scored.choices[0].logprobs is not None
    again = (scored.choices[0].logprobs.token_logprobs or [])[-8:]
    assert again == pytest.approx(values, abs=1e-4)
    assert math.isfinite(sum(value or 0.0 for value in values))


def test_errors_are_what_the_client_expects(doors: Doors) -> None:
    client = doors.openai()
    with pytest.raises(openai.AuthenticationError):
        doors.openai("tml-wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=PLAIN, messages=CHAT)
    body: Any = caught.value.body
    assert body["code"] == "no_chat_template"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=PLAIN, prompt="abc", max_tokens=100_000)
    body = caught.value.body
    assert (body["code"], body["param"]) == ("context_too_long", "max_tokens")
    assert "256" in body["message"]
