"""What a command says and how it ends when the server, the key or the address is not what it should be."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app import cli
from app.commands.client import FAILED, NOT_ALLOWED, UNREACHABLE, USAGE, Server
from tests.support.server import free_port

KEY = "tml-" + "k" * 43
NO_ADDRESSES = (
    "ftp://x",
    "http://[",
    "http://x:99999",
    "http://x..y",
    "http://é..y",
    "http://xn--a",
    f"http://{'a' * 64}.example",
    "http://x/\x7f",
    "http://x/#frag",
    "http://x?",
    "http://x/?a=b",
)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a program that answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def models_list(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """`tinsmith models list` with these options."""
    return CliRunner().invoke(cli.app, ["models", "list", *arguments], env=env)


def test_no_server_no_address_no_key(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for arguments, code, cause, remedy in (
        (["--url", nowhere, "--api-key", KEY], UNREACHABLE, nowhere, "tinsmith serve"),
        *(
            (
                ["--url", url, "--api-key", KEY],
                USAGE,
                f"{url!r} is not the address of a server",
                "http://127.0.0.1:8410",
            )
            for url in NO_ADDRESSES
        ),
        (["--data-dir", str(tmp_path)], NOT_ALLOWED, "dev_key", "--api-key"),
        (["--api-key", "tml-\nX: y"], NOT_ALLOWED, "characters", "another"),
        (["--api-key", "tml-ß"], NOT_ALLOWED, "characters", "another"),
        (["--api-key", ""], NOT_ALLOWED, "empty", "development key"),
    ):
        done = models_list(*arguments)
        assert (done.exit_code, done.stdout) == (code, ""), (arguments, done.output)
        first, second = done.stderr.splitlines()
        assert cause in first
        assert remedy in second
        assert KEY not in done.output


@pytest.mark.parametrize(
    ("status", "body", "code", "cause", "remedy"),
    [
        (401, b'{"detail": "x (y)", "error": {"hint": "y"}}', NOT_ALLOWED, "does not know this API key", "--api-key"),
        (403, b'{"detail": "x (y)", "error": {"hint": "y"}}', NOT_ALLOWED, "x", "y"),
        (400, b'{"detail": "no such name (one of a, b)", "error": {"hint": "one of a, b"}}', FAILED, "no such", "one"),
        (503, b'{"detail": "stopping (wait)", "error": {"hint": "wait"}}', FAILED, "stopping", "wait"),
        (502, b"<html>bad gateway</html>", UNREACHABLE, "502", "--url"),
        (302, b"", UNREACHABLE, "302", "--url"),
        (200, b"<html>a router</html>", UNREACHABLE, "200", "--url"),
    ],
)
def test_what_an_answer_means(status: int, body: bytes, code: int, cause: str, remedy: str) -> None:
    with answering(status, body) as url:
        done = models_list("--url", url, "--api-key", KEY)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    first, second = done.stderr.splitlines()
    assert cause in first
    assert remedy in second
    assert KEY not in done.output


def test_address_and_key_come_from_the_environment(tmp_path: Path) -> None:
    with answering(200, b'{"models": []}') as url:
        done = models_list(env={"TINSMITH_URL": url, "TINSMITH_KEY": KEY})
        assert (done.exit_code, done.stdout, "tinsmith models add" in done.stderr) == (0, "", True)
        (tmp_path / "dev_key").write_text(f"{KEY}\n")
        assert models_list(env={"TINSMITH_URL": url, "TINSMITH_DATA_DIR": str(tmp_path)}).exit_code == 0


def test_an_address_is_read_as_a_browser_reads_it() -> None:
    assert Server("HTTPS://Host:8/api/v1/", KEY).url == "https://Host:8", "its certificate is looked at, too"
    for url in ("http://ü.de", "http://localhost.:1", "http://[::1]:80/prefix"):
        assert Server(url, KEY).url == url


@contextmanager
def ending(answer: bytes, *, hard: bool = False) -> Iterator[str]:
    """The address of a program that reads a request, sends `answer` and hangs up, `hard`: by a reset."""

    def take(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)
            if hard:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=take, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "hard", "cause"),
    [
        (b"", False, "went away before it answered"),
        (b"", True, "went away before it answered"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", False, "went away before it answered"),
        (b"220 ready for mail\r\n\r\n", False, "does not speak http"),
        (b"\x15\x03\x03\x00\x02\x02\x0a", False, "does not speak http"),
    ],
)
def test_a_server_that_goes_away_is_not_one_that_speaks_something_else(answer: bytes, hard: bool, cause: str) -> None:
    with ending(answer, hard=hard) as url:
        done = CliRunner().invoke(cli.app, ["models", "add", "acme/x", "--url", url, "--api-key", KEY])
    assert (done.exit_code, done.stdout) == (UNREACHABLE, ""), done.output
    first, second = done.stderr.splitlines()[-2:]
    assert cause in first
    assert ("may have been carried out" in first) == ("tinsmith status" in second) == ("went away" in cause)
    assert url.replace("http:", "https:") in second, "a server behind TLS hangs up as well"
