"""A running server, as a command speaks to it: where it is, with which key, and what a failure means to a person.

Every failure is two lines on stderr, `error:` with the cause and `help:` with what to do, and an exit code of its own
kind. Nothing that is printed holds the key. Not responsible for what the commands ask for, nor for how they show it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from app.commands.output import FAILED, NOT_ALLOWED, UNREACHABLE, USAGE, fail
from app.commands.remedies import remedy

if TYPE_CHECKING:
    import httpx

__all__ = ["FAILED", "NOT_ALLOWED", "UNREACHABLE", "USAGE", "fail"]

API = "/api/v1"
DEFAULT_URL = "http://127.0.0.1:8410"
DEFAULT_DATA_DIR = "~/.local/share/tinsmith"
"""As `app.settings` says, which takes longer to import than the rest of a command."""
KEY_FILE = "dev_key"
SECONDS = 60.0
_NO_HTTP = ("illegal status line", "illegal request line")
"""What httpx says of an answer that does not begin as HTTP does; the second if it is no text, as what TLS sends."""

Url = Annotated[
    str, typer.Option(help="The running server. (variable TINSMITH_URL)", envvar="TINSMITH_URL", show_envvar=False)
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="API key; without it the development key in the data folder. (variable TINSMITH_KEY)",
        envvar="TINSMITH_KEY",
        show_envvar=False,
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="The server's data folder, where dev_key is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for other programs.")]


def data_folder(data_dir: Path | None = None) -> Path:
    """The data folder that is meant: given, named by TINSMITH_DATA_DIR, or the default one."""
    if data_dir is None:
        data_dir = Path(os.environ.get("TINSMITH_DATA_DIR") or DEFAULT_DATA_DIR)
    return data_dir.expanduser()


def development_key(data_dir: Path | None = None) -> str:
    """The key in the file of the data folder. Ends the command if there is none that can be read."""
    file = data_folder(data_dir) / KEY_FILE
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise fail(
            f"no API key: {file} cannot be read ({reason})",
            "start a server with `tinsmith serve`, or say with --data-dir where yours keeps its data; for one "
            "elsewhere give --api-key or set TINSMITH_KEY",
            NOT_ALLOWED,
        ) from None


class Server:
    """A running server and the key to ask it with.

    Every method ends the command (`typer.Exit`) when the server cannot be reached or says no.

    Args:
        url: its base address, without `/api/v1`.
        key: an API key or token of it.
    """

    def __init__(self, url: str, key: str) -> None:
        import httpx  # not for `--help`

        scheme, colon, rest = url.rstrip("/").removesuffix(API).partition(":")  # as people paste it
        self.url = f"{scheme.lower()}{colon}{rest}"
        self.key = key
        if not key.isascii() or not key.isprintable():
            raise fail("the API key has characters that no key has", "copy it again, or give another one", NOT_ALLOWED)
        if not _is_address(self.url):
            raise fail(f"{url!r} is not the address of a server", f"write it like {DEFAULT_URL}", USAGE)
        self.http: httpx.Client = httpx.Client(
            base_url=f"{self.url}{API}/",
            headers={"X-API-Key": key},
            timeout=SECONDS,
            verify=self.url.startswith("https:"),  # reading the certificates takes as long as a short command
        )

    def get(self, path: str, **query: Any) -> Any:
        """The JSON that `GET /api/v1/{path}` answers; query values that are None are left out."""
        return self.call("GET", path, query=query)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = SECONDS) -> Any:
        """The JSON that `POST` answers; fields that are None are left out."""
        return self.call("POST", path, body=body or {}, seconds=seconds)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that `PATCH` answers."""
        return self.call("PATCH", path, body=body)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that `PUT` answers."""
        return self.call("PUT", path, body=body)

    def delete(self, path: str, **query: Any) -> Any:
        """What `DELETE` answers: JSON, or None."""
        return self.call("DELETE", path, query=query)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        seconds: float = SECONDS,
    ) -> Any:
        """The answer's JSON, or None if it is empty.

        Args:
            path: below `/api/v1/`, its parts already quoted.
            body: a JSON object; fields that are None are left out.
            query: parameters; those that are None are left out, and booleans are written as JSON writes them.
            seconds: how long to wait for the answer.
        """
        answer = self.request(method, path, body=body, query=query, seconds=seconds)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            raise self._stranger(answer.status_code) from None

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        seconds: float = SECONDS,
    ) -> httpx.Response:
        """As `call`, the whole answer; it is a success."""
        import httpx

        json_body = None if body is None else {name: value for name, value in body.items() if value is not None}
        params = {
            name: json.dumps(value) if isinstance(value, bool) else value
            for name, value in (query or {}).items()
            if value is not None
        }
        try:
            answer = self.http.request(method, path.lstrip("/"), json=json_body, params=params, timeout=seconds)
        except httpx.HTTPError as error:
            raise self.unreachable(error, seconds) from None
        if not answer.is_success:
            raise self.refusal(answer)
        return answer

    def optional(self, path: str, **query: Any) -> Any:
        """As `get`; None if the server has no such route, being of another version."""
        import httpx

        try:
            answer = self.http.get(path, params={name: value for name, value in query.items() if value is not None})
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        if _lacks_route(answer):
            return None
        if not answer.is_success:
            raise self.refusal(answer)
        return answer.json()

    def readiness(self) -> dict[str, Any]:
        """What `readyz` says, also if it says no."""
        import httpx

        try:
            answer = self.http.get("readyz")
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        with suppress(ValueError):
            found = answer.json()
            if answer.status_code in (200, 503) and isinstance(found, dict) and "models" in found:
                return found
        raise self.refusal(answer)

    def upload(self, path: str, fields: Mapping[str, str | None], name: str, file: Path, seconds: float) -> Any:
        """The JSON that a form of these fields (None: left out) and one file, streamed from the disk, is answered."""
        import httpx

        given = {field: value for field, value in fields.items() if value is not None}
        try:
            with file.open("rb") as opened:
                answer = self.http.post(path, data=given, files={name: (file.name, opened)}, timeout=seconds)
        except OSError as error:
            raise fail(f"{file} cannot be read ({error.strerror})", "see that the file is there and yours") from None
        except httpx.HTTPError as error:
            raise self.unreachable(error, seconds) from None
        if not answer.is_success:
            raise self.refusal(answer)
        return answer.json()

    def stream_lines(
        self, method: str, path: str, *, body: Any = None, query: Any = None, again: bool = False
    ) -> Iterator[str]:
        """The lines of a streamed answer as they come; `path` as for `call`, or a whole address.

        Raises `ConnectionError` if the connection breaks after the answer has begun; if the caller asks `again`, also
        when there is no connection, or no server that is ready (503).
        """
        import httpx

        begun = False
        try:
            with self.http.stream(method, path, json=body, params=query) as answer:
                if not answer.is_success:
                    answer.read()
                    if again and answer.status_code == 503:
                        raise ConnectionError("the server is not ready")
                    raise self.refusal(answer)
                begun = True
                yield from answer.iter_lines()
        except httpx.HTTPError as error:
            if begun or again:
                raise ConnectionError("the stream broke") from None
            raise self.unreachable(error) from None

    def unreachable(self, error: Exception | None = None, seconds: float = SECONDS) -> typer.Exit:
        """Nothing that speaks this protocol answered, as `error` of httpx tells; returns the exit to raise."""
        import httpx

        if isinstance(error, httpx.TimeoutException):
            return fail(
                f"the server at {self.url} did not answer within {seconds:g} s",
                "see its log, or try again when it is less busy",
                UNREACHABLE,
            )
        if self.url.startswith("https:") and "SSL" in str(error):
            return fail(
                f"what listens at {self.url} does not speak https, or its certificate is not trusted here",
                f"try http:{self.url.removeprefix('https:')}, or let SSL_CERT_FILE name the certificate",
                UNREACHABLE,
            )
        if isinstance(error, httpx.RemoteProtocolError) and str(error).startswith(_NO_HTTP):
            return fail(f"what listens at {self.url} does not speak http", f"try {self._elsewhere()}", UNREACHABLE)
        if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
            return fail(
                f"the server at {self.url} went away before it answered: the request may have been carried out",
                "look with `tinsmith status` how it is, then run the command again; if it always ends so, try "
                f"{self._elsewhere()}",
                UNREACHABLE,
            )
        return fail(
            f"no server answers at {self.url}",
            "start one with `tinsmith serve`, or say with --url where it is",
            UNREACHABLE,
        )

    def _elsewhere(self) -> str:
        """Where the server may be if not at this address: often behind TLS, which answers plain http with nothing."""
        return (
            f"https:{self.url.removeprefix('http:')}, or another port"
            if self.url.startswith("http:")
            else "another port"
        )

    def refusal(self, answer: httpx.Response) -> typer.Exit:
        """What an answer that is no success means; returns the exit to raise."""
        message: str | None = None
        error: dict[str, Any] = {}
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            document = answer.json()
            error = document["error"]
            message = str(document.get("detail") or error["message"])
            if "detail" not in document:  # the routes for other protocols have the hint in brackets only
                error = {"hint": _bracketed(message), **error}
        if message is None:
            return self._stranger(answer.status_code)
        if error.get("code") == "model_not_found":
            message = message.partition(" (")[0]
            return fail(message, "`tinsmith status` lists the base models, `tinsmith checkpoints list` the checkpoints")
        if _lacks_route(answer):
            return self._other_version(answer.request.url.path.removeprefix(API))
        if error.get("hint"):  # `detail` is the message with the hint in brackets
            message = message.removesuffix(f" ({error['hint']})")
        if answer.status_code == 401:
            return fail(
                f"the server at {self.url} does not know this API key, or it has ended",
                "give another one with --api-key or TINSMITH_KEY, or name the server's data folder with --data-dir",
                NOT_ALLOWED,
            )
        status = answer.status_code
        return fail(message, remedy(status, error, _command()), NOT_ALLOWED if status == 403 else FAILED)

    def _other_version(self, route: str) -> typer.Exit:
        from importlib.metadata import version

        return fail(
            f"the server at {self.url} has no route {route}: it is of another version than this command, "
            f"{version('tinsmith')}",
            "update the older of the two; `tinsmith status` tells the server's version",
        )

    def _stranger(self, status: int) -> typer.Exit:
        return fail(
            f"what answers at {self.url} is not a Tinsmith server (status {status})",
            "say with --url where the server is",
            UNREACHABLE,
        )


def _lacks_route(answer: httpx.Response) -> bool:
    """Whether a Tinsmith server says that it does not have the route itself (and not only the object)."""
    with suppress(ValueError, KeyError, TypeError):
        told = str(answer.json()["detail"])
        return answer.status_code == 404 and told.startswith(f"there is no {answer.request.method} /")
    return False


def _bracketed(message: str) -> str | None:
    """What stands in brackets at the end of a message."""
    return message[message.rindex(" (") + 2 : -1] if message.endswith(")") and " (" in message else None


def _command() -> str | None:
    """The words of the command that runs."""
    from typer._click.globals import get_current_context

    context = get_current_context(silent=True)
    return None if context is None else context.command_path


def _is_address(url: str) -> bool:
    """Whether requests can be sent below this address.

    What follows a `?` or `#` would take up the path of every request; a name that cannot be looked up (`x..y`) is found
    only when it is encoded, which httpx and then the socket do each in its own way.
    """
    import httpx

    if "?" in url or "#" in url:
        return False
    try:
        parts, sent = urlsplit(url), httpx.URL(url)
        name = sent.host and sent.raw_host.decode("ascii").encode("idna")
        return parts.scheme in ("http", "https") and bool(name) and parts.port != 0
    except (ValueError, httpx.InvalidURL):  # a UnicodeError is a ValueError
        return False


def connect(url: str, api_key: str | None = None, data_dir: Path | None = None) -> Server:
    """The server that a command's options mean; without a key, the development key of the data folder.

    An empty key ends the command: most often a variable is not set, and the development key may do everything.
    """
    if api_key is not None and not api_key.strip():
        raise fail("the API key is empty", "give one, or leave --api-key out for the development key", NOT_ALLOWED)
    return Server(url, development_key(data_dir) if api_key is None else api_key)
