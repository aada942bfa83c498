"""One prompt, greedy, through every door and the SDK: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doors.conftest import CHAT, MODEL, PROMPT, Doors, tokens_of

LENGTH = 24


@pytest.mark.parametrize("adapter", [True, False])
def test_every_way_draws_the_same_tokens(
    doors: Doors, knowing: str, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = knowing if adapter else MODEL
    sdk, sdk_logprobs = _sdk(doors, model, adapter, monkeypatch)
    client = doors.openai()
    options: Any = {"model": model, "temperature": 0, "max_tokens": LENGTH}
    completion = client.completions.create(**options, prompt=tokens_of(PROMPT), logprobs=0).choices[0].logprobs
    assert completion is not None
    chat = client.chat.completions.create(**options, messages=CHAT, logprobs=True).choices[0].logprobs
    assert chat is not None
    chat_bytes = [bytes(token.bytes or ()) for token in chat.content or []]
    alphabet = _bytes()
    assert chat_bytes == [alphabet[token] for token in sdk]
    names = [name.encode() if not name.startswith("bytes:") else name for name in completion.tokens or []]
    assert [name if isinstance(name, bytes) else bytes([int(name[-2:], 16)]) for name in names] == chat_bytes
    assert completion.token_logprobs == pytest.approx(sdk_logprobs, abs=1e-4)
    message = doors.anthropic().messages.create(
        model=model, max_tokens=LENGTH, messages=CHAT, extra_body={"temperature": 0}
    )
    assert message.content[0].type == "text"
    assert message.content[0].text == b"".join(chat_bytes).decode("utf-8", "replace")


def _bytes() -> dict[int, bytes]:
    """What each token of the tiny model stands for."""
    from app.services.doors.tokens import _BYTES_OF

    return {3 + place: bytes([byte]) for place, (_, byte) in enumerate(sorted(_BYTES_OF.items()))}


def _sdk(
    doors: Doors, model: str, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[float | None]]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    import tinker
    from tinker import types

    with tinker.ServiceClient(base_url=doors.server.url, api_key=doors.server.key) as service:
        which: dict[str, Any] = {"model_path": model} if adapter else {"base_model": model}
        sampler: Any = service.create_sampling_client(**which).result()
        result = sampler.sample(
            types.ModelInput.from_ints(tokens_of(PROMPT)),
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=LENGTH, temperature=0.0),
        ).result()
    [sequence] = result.sequences
    return list(sequence.tokens), list(sequence.logprobs or [])
