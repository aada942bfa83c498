"""One hostile request: what is sent, and what must come of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

BASE_MODEL = "acme/tiny"
"""What the attacked server serves: 259 tokens, 256 positions."""

JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass(frozen=True, slots=True)
class Targets:
    """What there is on the attacked server. `$name` in a case stands for the value."""

    session: str
    model: str
    """A training run of `session` with an accumulated gradient."""
    sampler: str
    path: str
    """A training checkpoint of `model`."""
    export: str
    """Path and query of a signed address of one of its exported files, and of a tar of them."""
    archive: str
    loss: str
    """An uploaded loss of `session`: the sum of `-logprobs * weights`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    `body` is sent as JSON, or else `content` as it is (made when it is sent, if it is a function). Without `status` the
    answer must be 400; `field` is the field that the error names, or the beginning of it; `says` stands in the message.
    """

    what: str
    path: str
    body: Any = None
    content: bytes | Callable[[Targets], bytes] | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    status: tuple[int, ...] = (400,)
    field: str | None = None
    says: str = ""
    key: bool = True

    def sent(self, targets: Targets) -> tuple[str, bytes, dict[str, str]]:
        """Path, body and headers with the names filled in."""
        headers = {name: _filled(value, targets) for name, value in self.headers.items()}
        if self.body is not None:
            content, kind = _filled(json.dumps(self.body), targets).encode(), JSON
        else:
            given = self.content(targets) if callable(self.content) else self.content
            content = given or b"" if callable(self.content) else _filled_bytes(given or b"", targets)
            kind = {} if given is None else JSON
        return _filled(self.path, targets), content, {**kind, **headers}


def _filled(text: str, targets: Targets) -> str:
    for name in Targets.__slots__:
        text = text.replace(f"${name}", getattr(targets, name))
    return text


def _filled_bytes(data: bytes, targets: Targets) -> bytes:
    for name in Targets.__slots__:
        data = data.replace(f"${name}".encode(), getattr(targets, name).encode())
    return data


def spliced(body: Any, value: str) -> bytes:
    """The JSON text of `body`, with `value` as it is where `"@@"` stands: for what a JSON library does not write."""
    text = json.dumps(body)
    assert text.count('"@@"') == 1
    return text.replace('"@@"', value).encode()
