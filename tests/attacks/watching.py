"""What this process does beside computing: addresses it looks up or connects to, programs it starts, pickles it reads.

The interpreter itself reports it (PEP 578), so nothing has to be replaced and no library can do it unseen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EVENTS = frozenset(
    {
        *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"),
        *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.startfile", "pty.spawn"),
        *("pickle.find_class", "code.__new__", "marshal.loads", "shutil.unpack_archive"),
    }
)
_watching: list[list[str]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in EVENTS:
        _watching[-1].append(f"{event} {arguments!r:.200}")


sys.addaudithook(_hook)  # for good: a hook cannot be taken away


@contextmanager
def watched() -> Iterator[list[str]]:
    """A list that fills with what happens inside."""
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)
