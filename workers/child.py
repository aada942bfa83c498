"""The program of a rank's process (`python -m workers.child`): load a base model, then run calls one by one.

Requests come on standard input and replies go to standard output, which are taken away from everything else first, so
that a library's print cannot break the stream. The process ends when its input ends: it never outlives the server.
Ctrl-C and SIGTERM are left to the server, which drains its work and then says `Stop` (service managers signal the
children of a service as well).
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import sys
import threading
from typing import BinaryIO

from schemas.errors import EngineFailure, TinsmithError, Unavailable
from workers.build import resolve_builder
from workers.dispatch import invoke
from workers.faults import to_tinsmith_error
from workers.messages import (
    PICKLE_PROTOCOL,
    Answer,
    Call,
    Ping,
    Progress,
    Ready,
    Reply,
    Start,
    StartFailed,
    Stop,
)

_log = logging.getLogger("tinsmith.worker")

NICENESS = 5
"""Where cores are short, the process that answers clients goes before the one that computes for minutes."""


class RankServer:
    """Serves one worker over a pair of streams."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._reply_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Call | Ping | Stop] = queue.SimpleQueue()
        self._calls_lock = threading.Lock()
        self._calls = 0
        """Calls received and not yet answered."""
        self._rank = 0

    def serve(self) -> int:
        """Load, then run calls until told to stop; returns the exit code."""
        start: Start = pickle.load(self._requests)
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        self._rank = start.rank
        worker = self._load(start)
        if worker is None:
            return 1
        while True:
            request = self._inbox.get()
            if isinstance(request, Stop):
                return 0
            if isinstance(request, Ping):
                self._reply(Answer(request.call_id))
                continue
            self._reply(self._answer(worker, request))
            self._count_calls(-1)

    def _load(self, start: Start) -> object | None:
        try:
            worker = resolve_builder(start.spec)(start.spec, lambda text: self._reply(Progress(text)))
            self._reply(Ready(worker.info))  # type: ignore[attr-defined]
        except Exception as error:
            self._reply(StartFailed(_start_error(error, start.spec.model)))
            return None
        return worker

    def _answer(self, worker: object, call: Call) -> Answer:
        try:
            value = invoke(worker, call.method, call.args, call.kwargs)
            return Answer(call.call_id, value if self._rank == 0 else None)
        except Exception as error:
            return Answer(call.call_id, error=to_tinsmith_error(error, call.method))

    def _reply(self, reply: Reply) -> None:
        try:
            data = pickle.dumps(reply, PICKLE_PROTOCOL)
        except Exception as error:
            if not isinstance(reply, Answer):
                raise
            _log.error("the result of a call cannot be sent", exc_info=error)
            data = pickle.dumps(Answer(reply.call_id, error=EngineFailure("the worker's result cannot be sent")))
        with self._reply_lock:
            self._replies.write(data)
            self._replies.flush()

    def _read(self) -> None:
        """Reader thread: keeps the pipe empty, so that the server never waits for a long computation to write."""
        while True:
            try:
                request = pickle.load(self._requests)
            except (EOFError, OSError):
                # The server is gone. There is nobody to tell and nothing to finish: saves are atomic.
                os._exit(0)
            if isinstance(request, Call):
                self._count_calls(+1)
            elif isinstance(request, Ping) and self._count_calls(0) > 0:
                self._reply(Answer(request.call_id))
                continue
            self._inbox.put(request)

    def _count_calls(self, change: int) -> int:
        with self._calls_lock:
            self._calls += change
            return self._calls


def _start_error(error: Exception, model: str) -> TinsmithError:
    if isinstance(error, TinsmithError):
        return error
    _log.error("base model %s cannot be loaded", model, exc_info=error)
    return Unavailable(
        f"base model {model!r} cannot be loaded ({type(error).__name__})", hint="the server's log has the details"
    )


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        code = RankServer(requests, replies).serve()
    except (BrokenPipeError, EOFError):
        code = 0
    except SystemExit as end:  # a rank that cannot go on with the others
        code = end.code if isinstance(end.code, int) else 1
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: the reader thread sits in a read, and thread pools of libraries may not end by themselves.
    os._exit(code)


if __name__ == "__main__":
    main()
