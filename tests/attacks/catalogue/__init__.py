"""Every hostile request of the suite, by kind. `tests/attacks/test_catalogue.py` sends them to the application in its
own process, `python -m benchmarks attacks` over a socket to a server that works for somebody else meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.attacks.catalogue import doors, exports, hosts, images, losses, metadata, names, numbers, payloads
from tests.attacks.catalogue.case import Case

KINDS: dict[str, Callable[[], Iterable[Case]]] = {
    "names and paths": names.cases,
    "base models": names.models,
    "broken bodies": payloads.cases,
    "numbers and tensors": lambda: [*numbers.cases(), *numbers.protobuf()],
    "images and addresses": images.cases,
    "custom losses": losses.cases,
    "OpenAI's and Anthropic's routes": doors.cases,
    "texts for people": metadata.cases,
    "downloads and archives": exports.cases,
    "keys, hosts and origins": hosts.cases,
}
