"""What a storage says when it is full, forbids or forgets: told in our words, and nothing of its answer leaks.

The real server of the other tests is never full, so this one only knows how to refuse.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from schemas.errors import NotFound, Unavailable
from store.object_storage import ObjectStorage, StorageAddress
from tests.support.object_server import BUCKET, CREDENTIALS

LEAK = "what-only-the-storage-may-say"


class Refusing(BaseHTTPRequestHandler):
    """Answers every request with the status and the code that its server was given."""

    def refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, code = self.server.answer  # type: ignore[attr-defined]
        self.server.requests += 1  # type: ignore[attr-defined]
        body = f"<Error><Code>{code}</Code><Message>{LEAK}</Message><AWSAccessKeyId>{LEAK}</AWSAccessKeyId></Error>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_PUT = do_POST = do_DELETE = refuse

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def refusing(aws: None) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        server.requests = 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (507, "XMinioStorageFull", "status 507 (XMinioStorageFull)"),
        (503, "SlowDown", "status 503 (SlowDown)"),
        (403, "SignatureDoesNotMatch", "refuses the credentials or what they may do (SignatureDoesNotMatch)"),
        (401, "AccessDenied", "refuses the credentials or what they may do (AccessDenied)"),
        (404, "NoSuchBucket", "it has no such bucket"),
        (404, "NoSuchUpload", "it forgets uploads before they end"),
    ],
)
async def test_refusals_are_told_in_our_words(
    refusing: ThreadingHTTPServer, tmp_path: Path, status: int, code: str, said: str
) -> None:
    refusing.answer = (status, code)  # type: ignore[attr-defined]
    storage = ObjectStorage(StorageAddress(BUCKET, "x", f"http://127.0.0.1:{refusing.server_port}", None, 0.5))
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(Unavailable) as refused:
        await storage.put_file("key", tmp_path / "file")
    assert said in refused.value.message
    assert refusing.requests < 12, "repeats are bounded"  # type: ignore[attr-defined]
    told = f"{refused.value.message} {refused.value.hint} {refused.value.__cause__}"
    assert not any(secret in told for secret in (LEAK, *CREDENTIALS.values(), "127.0.0.1"))
    storage.close()


async def test_an_object_that_is_not_there_is_told_apart_from_a_file_that_is_not(
    refusing: ThreadingHTTPServer, tmp_path: Path
) -> None:
    refusing.answer = (404, "NoSuchKey")  # type: ignore[attr-defined]
    storage = ObjectStorage(StorageAddress(BUCKET, "x", f"http://127.0.0.1:{refusing.server_port}", None, 0.5))
    with pytest.raises(NotFound):
        await storage.get("key")
    with pytest.raises(FileNotFoundError):
        await storage.put_file("key", tmp_path / "missing")
    storage.close()
