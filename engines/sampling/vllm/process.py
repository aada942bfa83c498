"""The vLLM process as the worker sees it: start it, exchange messages with it, learn of its end."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

from engines.sampling.vllm.environment import VllmEnvironment, host_environment
from engines.sampling.vllm.messages import (
    PICKLE_PROTOCOL,
    HostFailed,
    HostNews,
    HostOptions,
    HostReady,
    HostTurn,
    Reply,
)
from schemas.errors import EngineFailure, Unavailable
from schemas.pipes import read_message

_log = logging.getLogger(__name__)

_END_SECONDS = 5.0
"""How long the process may take to end once its input has ended, before it is killed."""


class VllmProcess:
    """One vLLM process. Used by one thread. `exchange` is a question and its answer, in turn.

    Args:
        start_timeout: seconds that vLLM may take to load.
        step_timeout: seconds that one step may take; the first ones may compile kernels.
    """

    def __init__(
        self,
        environment: VllmEnvironment,
        options: HostOptions,
        *,
        start_timeout: float = 900.0,
        step_timeout: float = 600.0,
    ) -> None:
        self._step_timeout = step_timeout
        self._replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [str(environment.python), "-m", "engines.sampling.vllm.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=host_environment(os.environ, on_cpu=environment.on_cpu, threads=options.threads),
            process_group=0 if sys.platform != "win32" else None,
        )
        threading.Thread(target=self._read, name="vllm-replies", daemon=True).start()
        self._send(options)
        reply = self._receive(start_timeout)
        if not isinstance(reply, HostReady):
            self.close()
            reason = reply.reason if isinstance(reply, HostFailed) else f"no answer within {start_timeout:g} s"
            raise Unavailable(f"vLLM cannot load the base model ({reason})", hint="the server's log has the details")
        self.ready = reply

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def exchange(self, turn: HostTurn) -> HostNews:
        """Do one turn. Raises `EngineFailure` if the process is lost; it is gone then."""
        self._send(turn)
        reply = self._receive(self._step_timeout)
        if isinstance(reply, HostNews):
            return reply
        _log.error("the vLLM process is lost: %s", reply)
        self.close()
        reason = f" ({reply.reason})" if isinstance(reply, HostFailed) else ""
        raise EngineFailure(f"the vLLM process ended in the middle of the work{reason}")

    def close(self) -> None:
        """End the process: its input ends; if that is not enough, it is killed."""
        with suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _send(self, message: HostOptions | HostTurn) -> None:
        """To a dead process it does nothing: the missing answer tells."""
        with suppress(OSError, ValueError):
            self._stdin.write(pickle.dumps(message, PICKLE_PROTOCOL))
            self._stdin.flush()

    def _receive(self, timeout: float) -> Reply | None:
        try:
            return self._replies.get(timeout=timeout)
        except queue.Empty:
            return None

    def _read(self) -> None:
        """Reader thread: None tells that the process has closed its output."""
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while True:
                try:
                    reply = read_message(stdout)
                except EOFError:
                    break
                except Exception:
                    _log.exception("a message of vLLM cannot be read; its process is ended")
                    self._process.kill()
                    break
                self._replies.put(reply)
        self._replies.put(None)
