"""One rank's process as the server sees it: start it, write to it, hear from it, learn of its end.

Not responsible for what the messages mean (`workers/local.py`).
"""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO

from schemas.pipes import read_message
from workers.messages import PICKLE_PROTOCOL, Logged, Reply, Request, Start

logger = logging.getLogger(__name__)

_REAP_SECONDS = 5.0
"""How long a process may take to end after it closed its output, before it is killed."""
_living: weakref.WeakSet[RankProcess] = weakref.WeakSet()


def kill_all() -> None:
    """End every rank that this process has started: one that hangs would not notice that its server is gone."""
    for process in list(_living):
        process.kill()


class RankProcess:
    """A child process with one reader thread.

    `on_reply(self, reply)` and, once, `on_end(self, reason)` are called from the reader thread. `inherited` are
    descriptors that the process gets besides its standard ones, under the same numbers; `python` is the interpreter
    that runs it, which finds the project by `env`.
    """

    def __init__(
        self,
        start: Start,
        env: Mapping[str, str],
        on_reply: Callable[[RankProcess, Reply], None],
        on_end: Callable[[RankProcess, str], None],
        inherited: tuple[int, ...] = (),
        python: str = sys.executable,
    ) -> None:
        self.rank = start.rank
        self._on_reply = on_reply
        self._on_end = on_end
        self._process = subprocess.Popen(
            [python, "-m", "workers.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(env),
            pass_fds=inherited,
            # A group of its own, so that Ctrl-C in the server's terminal does not reach a child that is still starting.
            process_group=0 if sys.platform != "win32" else None,
        )
        _living.add(self)
        self._reader = threading.Thread(target=self._read, name=f"rank-{start.rank}", daemon=True)
        self._reader.start()
        self.send(start)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, request: Request) -> None:
        """Write one message, as `write`."""
        self.write(pickle.dumps(request, PICKLE_PROTOCOL))

    def write(self, data: bytes) -> None:
        """Write a pickled message. Blocks while the pipe is full. To a dead process it does nothing: `on_end` tells of
        it."""
        with suppress(OSError):
            self._stdin.write(data)
            self._stdin.flush()

    def kill(self) -> None:
        """End the process at once; the reader thread reaps it."""
        self._process.kill()

    def wait_stopped(self, grace: float) -> None:
        """Wait up to `grace` seconds for the process to end by itself (after `Stop`), then kill it. Blocking."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_REAP_SECONDS)
        with suppress(OSError):
            self._stdin.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while True:
                try:
                    reply = read_message(stdout)
                except EOFError:
                    break
                except Exception:
                    logger.exception("a message of rank %d cannot be read; its process is ended", self.rank)
                    self._process.kill()
                    break
                if isinstance(reply, Logged):
                    relog(reply)
                else:
                    self._on_reply(self, reply)
        try:
            code = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._on_end(self, describe_exit(code))


def relog(told: Logged) -> None:
    """Log what a rank has logged, with its time and under its name."""
    source = logging.getLogger(told.logger)
    if not source.isEnabledFor(told.level):
        return
    record = source.makeRecord(told.logger, told.level, "", 0, told.message, (), None)
    record.created, record.exc_text = told.created, told.exception
    source.handle(record)


def describe_exit(code: int) -> str:
    """An exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        return "killed (SIGKILL; often because the machine ran out of memory)"
    return f"killed by {name}"
