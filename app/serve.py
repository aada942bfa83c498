"""Runs the application under uvicorn in the foreground: the socket, the signals, and what the terminal shows.

One line says that the server is ready, and only when every base model has answered. Not responsible for what is served
(`app/main.py`) or for reading options (`app/cli.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import typer
import uvicorn
from fastapi import FastAPI

from app import logging as server_log
from app import memory
from app.commands.output import SETTINGS_HELP, fail, say, warn
from app.connection import BoundedProtocol
from app.exposure import exposed
from app.lifecycle import Lifecycle
from app.main import create_app
from app.readiness import Readiness, describe
from app.settings import Settings, SettingsError
from app.summary import summarize
from app.tls import server_context
from schemas.errors import TinsmithError
from workers.rank_process import kill_all

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that the server is not the one to close a connection just reused."""
CLOSE_SECONDS = 5
"""What open connections get once the work is drained."""
PROGRESS_SECONDS = (5.0, 10.0, 20.0, 30.0)
"""Pauses between two lines that say the same; something new is said at once."""
FAILED = 1
SWITCH_SECONDS = 0.0005
"""How long a thread that decodes a large body may keep the interpreter from the event loop. At Python's default of 5 ms
the loop loses that much at every system call, and heartbeats beside a burst of large bodies become slow."""


def run(settings: Settings, make_app: Callable[[Settings], FastAPI] = create_app) -> int:
    """Serve until a signal; returns the exit code (0 after a drain, 1 if the server could not start)."""
    try:
        tls = server_context(settings)
        listener = listen(settings.host, settings.port)
    except SettingsError as error:
        fail(f"cannot start: {error}", error.remedy or SETTINGS_HELP)
        return FAILED
    except OSError as error:
        fail(*cannot_listen(settings, error))
        return FAILED
    try:
        server_log.configure(
            settings.log_level,
            settings.log_format,
            settings.own_log_file if settings.log_file is not None else None,
            requests=settings.log_requests,
            trace_ids=settings.otel_endpoint is not None,
        )
    except OSError as error:
        listener.close()
        fail(f"log_file {settings.log_file} cannot be written ({error.strerror})", "name another one with --log-file")
        return FAILED
    warning = exposed(settings)
    if warning is not None:
        warn(warning)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    memory.bound()
    with listener:
        app = make_app(settings)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=BoundedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the application does it, for trusted proxies only
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        server = Server(config, app, settings, url_of(listener, encrypted=tls is not None))
        try:
            server.run(sockets=[listener])
        except SystemExit:  # uvicorn's way to say that the application did not start
            server.explain_failed_start()
            return FAILED
    return server.exit_code


class Server(uvicorn.Server):
    """uvicorn's server with our signals (drain, then exit; a second one exits at once) and our words."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: Settings, url: str) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._url = url
        self._tasks: set[asyncio.Task[None]] = set()
        self._signals = 0
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the data folder, begin to listen, then watch the base models load."""
        own_words = logging.getLogger("uvicorn.error")
        own_words.disabled = True  # `explain_failed_start` says it better
        try:
            await super().startup(sockets)
        finally:
            own_words.disabled = False
        if self.should_exit:
            return
        self._keep_log()
        self._spawn(self._announce())

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGINT and SIGTERM in the event loop while serving."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def on_signal(self, number: int) -> None:
        """First: drain, then exit. Second: exit now."""
        self._signals += 1
        if self._signals == 1:
            grace = self._settings.shutdown_grace
            say(f"stopping: accepted work gets up to {grace:g} s; a second signal stops at once", err=True)
            self._spawn(self._drain())
            return
        for child in multiprocessing.active_children():
            child.kill()
        kill_all()
        os._exit(128 + number)

    def explain_failed_start(self) -> None:
        """Say why the application did not come up."""
        error = getattr(self._app.state, "startup_error", None)
        if isinstance(error, TinsmithError):
            folder = self._settings.data_dir
            remedy = error.hint or f"`tinsmith doctor --data-dir {folder}` looks at it; --data-dir names another one"
            fail(f"cannot start with data folder {folder}: {error.message}", remedy)
        elif isinstance(error, Exception):
            logger.error("the server could not start", exc_info=error)

    def _keep_log(self) -> None:
        """Begin the file in the data folder, which is open now."""
        file = self._settings.own_log_file
        if file is None or self._settings.log_file is not None:
            return
        problem = server_log.keep_in(file)
        if problem is not None:
            warn(f"the log is only here: {file} cannot be written ({problem})")

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        lifecycle: Lifecycle = self._app.state.lifecycle
        try:
            await lifecycle.drain()
        except Exception:
            logger.exception("draining failed")
        self.should_exit = True
        logger.info("all accepted work is done or kept for the next start; the server ends")

    async def _announce(self) -> None:
        """Watch the base models load; end with the ready line, or with the reason and exit code 1."""
        readiness: Readiness = self._app.state.readiness
        began = time.monotonic()
        shown, repeats, quiet_until = "", 0, began + 1.0
        while not self.should_exit and not self._signals:
            if (await readiness.check()).status == "ready":
                self._tell_needs()
                typer.echo(self._ready_line())
                self._tell_how_to_go_on()
                self._spawn(summarize(self._app.state.events))
                return
            if self._give_up():
                return
            line, now = self._progress(), time.monotonic()
            if line and (now >= quiet_until or (shown and line != shown)):
                repeats = repeats + 1 if line == shown else 0
                typer.echo(f"{line}  [{now - began:.0f} s]")
                shown, quiet_until = line, now + PROGRESS_SECONDS[min(repeats, len(PROGRESS_SECONDS) - 1)]
            await asyncio.sleep(0.2)

    def _tell_how_to_go_on(self) -> None:
        """What somebody who has just started it may want to know next."""
        if sys.stderr.isatty():
            file = self._settings.own_log_file
            requests = "" if file is None else f"; each request has a line in {file} (tinsmith logs --follow)"
            say(f"Ctrl-C stops the server; the address has a console{requests}", err=True)

    def _tell_needs(self) -> None:
        """Log what each base model and its training take of the memory that there is."""
        for name, runtime in self._app.state.services.models.runtimes.items():
            if runtime.info is not None:
                logger.info("%s: %s", name, runtime.info.memory.text)

    def _progress(self) -> str:
        runtimes = self._app.state.services.models.runtimes.items()
        return "; ".join(f"{name}: {describe(runtime)}" for name, runtime in runtimes if runtime.state != "ready")

    def _give_up(self) -> bool:
        """Stop with exit code 1 if a base model cannot be served, saying why."""
        runtimes = self._app.state.services.models.runtimes.items()
        failed = [(name, runtime) for name, runtime in runtimes if runtime.state == "failed"]
        for name, runtime in failed:
            cause = runtime.failure.message if runtime.failure is not None else describe(runtime)
            hint = runtime.failure.hint if runtime.failure is not None else None
            fail(f"base model {name} cannot be served: {cause}", hint or f"then start again; {SETTINGS_HELP}")
        if failed:
            self.exit_code = FAILED
            self.should_exit = True
        return bool(failed)

    def _ready_line(self) -> str:
        names = ", ".join(self._settings.base_models)
        key = self._app.state.dev_key
        where = self._settings.data_dir / "dev_key"
        return f"ready  {self._url}  models: {names}  key: {key}  (in {where})"


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError if the address cannot be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def cannot_listen(settings: Settings, error: OSError) -> tuple[str, str]:
    """Why an address cannot be had, and what to do."""
    place = f"cannot listen on {settings.host}:{settings.port}"
    if isinstance(error, socket.gaierror):
        return f"{place}: {settings.host!r} is not an address of this machine", "give --host 127.0.0.1, or 0.0.0.0"
    if error.errno == errno.EADDRINUSE:
        return f"{place}: the port is in use", "stop what uses it, or choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place}: this machine does not have the address", "give --host 127.0.0.1, or 0.0.0.0"
    if error.errno == errno.EACCES:
        return f"{place}: this user may not", "choose a port above 1023 with --port"
    return f"{place}: {error.strerror}", "choose another address with --host and --port"


def url_of(listener: socket.socket, *, encrypted: bool = False) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: every held poll is a connection."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a container may forbid it: then the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logger.debug("open files: soft limit %s, hard limit %s", soft, hard)
