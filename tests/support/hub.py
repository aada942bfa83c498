"""A stand-in for the Hugging Face hub that takes uploads: what `huggingface_hub` asks when a folder is uploaded.

Responsible for whoami, the creation of a repository, and commits whose files are sent inside the request. Not
responsible for downloads: every file is absent.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """Where it is, and the files of each repository that was committed to."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> Any:
        """What is said to a POST."""
        if path.endswith("/repos/create"):
            name = json.loads(body)["name"]
            return {"url": f"{self.url}/tester/{name}", "name": f"tester/{name}", "id": f"tester/{name}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            listed = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]
            return {"files": listed}
        repository = path.removeprefix("/api/models/").split("/commit/")[0]
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.files.setdefault(repository, {})[entry["value"]["path"]] = content
        return {"commitUrl": f"{self.url}/{repository}/commit/0", "commitOid": "0", "success": True}


@contextmanager
def hub() -> Iterator[Hub]:
    """A running stand-in, for `HF_ENDPOINT`."""
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def say(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def do_GET(self) -> None:
            if self.path == "/api/whoami-v2":
                self.say(200, {"name": "tester", "type": "user"})
            else:
                self.say(404, {"error": "not here"})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self.say(200, found.answer(self.path, self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *words: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
