"""What a command says and how it ends when the server, the key or the address is not what it should be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app import cli
from app.commands.client import FAILED, NOT_ALLOWED, UNREACHABLE
from tests.support.server import free_port

KEY = "tml-" + "k" * 43


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
        (["--url", "ftp://x", "--api-key", KEY], UNREACHABLE, "ftp://x", "http://127.0.0.1:8410"),
        (["--url", "http://[", "--api-key", KEY], UNREACHABLE, "http://[", "http://127.0.0.1:8410"),
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
