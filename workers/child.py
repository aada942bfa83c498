"""The program of a rank's process (`python -m workers.child`): load a base model, then run calls one by one.

Requests come on standard input and replies go to standard output, which are taken away from everything else first, so
that a library's print cannot break the stream. The process ends when its input ends: it never outlives the server.
Ctrl-C and SIGTERM are left to the server, which drains its work and then says `Stop` (service managers signal the
children of a service as well).
"""

from __future__ import annotations

import gc
import logging
import logging.handlers
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import BinaryIO

from schemas.errors import EngineFailure, TinsmithError, Unavailable
from schemas.pipes import read_message
from workers.build import resolve_builder
from workers.dispatch import invoke
from workers.faults import to_tinsmith_error
from workers.messages import (
    PICKLE_PROTOCOL,
    Answer,
    Call,
    Logged,
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
        start: Start = read_message(self._requests)
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
        # Libraries make millions of objects that stay; looking through them for garbage is a tenth of the start.
        gc.disable()
        try:
            worker = resolve_builder(start.spec)(start.spec, lambda text: self._reply(Progress(text)))
            self._reply(Ready(worker.info))  # type: ignore[attr-defined]
        except Exception as error:
            self._reply(StartFailed(_start_error(error, start.spec.model)))
            return None
        finally:
            gc.freeze()
            gc.enable()
        return worker

    def _answer(self, worker: object, call: Call) -> Answer:
        try:
            value = invoke(worker, call.method, call.args, call.kwargs)
            return Answer(call.call_id, value if self._rank == 0 else None)
        except Exception as error:
            return Answer(call.call_id, error=to_tinsmith_error(error, call.method))

    def tell(self, record: Logged) -> None:
        """Send a record of the log to the server, which knows in what form it is wanted."""
        self._reply(record)

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
                request = read_message(self._requests)
            except EOFError:
                # The server is gone. There is nobody to tell and nothing to finish: saves are atomic.
                os._exit(0)
            except Exception:
                # Nothing that comes later can be read either; the server learns of it by this end.
                traceback.print_exc()
                os._exit(1)
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


class _Forward(logging.Handler):
    """Hands records on as messages."""

    def __init__(self, tell: Callable[[Logged], None]) -> None:
        super().__init__()
        self._tell = tell
        self._form = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        exception = record.exc_text or (self._form.formatException(record.exc_info) if record.exc_info else None)
        try:
            self._tell(Logged(record.name, record.levelno, record.created, record.getMessage(), exception))
        except OSError:  # the server is gone, and this process ends with it
            sys.stderr.write(f"{record.name}: {record.getMessage()}\n")


class _Queue(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """See `QueueHandler`: the traceback is kept, for whoever takes the record out is in this process."""
        return record


def log_through(tell: Callable[[Logged], None]) -> logging.handlers.QueueListener:
    """Send what this process logs, warnings of libraries included, to `tell`, in a thread; stopped, all has been sent.

    A thread, because a record may come from anywhere, also from the middle of another message's way into the pipe.
    """
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = logging.handlers.QueueListener(records, _Forward(tell))
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.INFO, handlers=[_Queue(records)])
    listener.start()
    return listener


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    server = RankServer(requests, replies)
    log = log_through(server.tell)
    try:
        code = server.serve()
    except (BrokenPipeError, EOFError):
        code = 0
    except SystemExit as end:  # a rank that cannot go on with the others
        code = end.code if isinstance(end.code, int) else 1
    except Exception:
        _log.exception("this process cannot go on")
        code = 1
    log.stop()  # what has been logged is on its way then
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: the reader thread sits in a read, and thread pools of libraries may not end by themselves.
    os._exit(code)


if __name__ == "__main__":
    main()
