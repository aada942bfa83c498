"""The web console's files, and short addresses of its pages.

Everything here is public, like any program that a browser loads: the key is typed into the page, and what the page
shows comes through the other routes with it. Pages live behind the `#` of `/console/`, so that no id reaches a log.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Annotated
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from schemas.errors import NotFound

router = APIRouter(include_in_schema=False)

FOLDER = FilePath(__file__).parent.parent / "console" / "static"
PAGES = ("sessions", "training_runs", "checkpoints", "keys", "playground")
"""Pages whose addresses other programs make (the SDK among them): `/sessions/ID` leads to the page of a session."""
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
"""Nothing inline and nothing from elsewhere: text of users cannot become a script."""

_files = StaticFiles(directory=FOLDER)


@router.get("/")
@router.get("/console")
async def root() -> Response:
    """To the console."""
    return RedirectResponse("console/", 307)


@router.get("/console/")
async def console(request: Request) -> Response:
    """The console's one page."""
    return await _file(request, "index.html")


@router.get("/console/{path:path}")
async def console_file(path: Annotated[str, Path(max_length=512)], request: Request) -> Response:
    """A file of the console, or the way to a page by its short address."""
    if path.partition("/")[0] in PAGES:
        return to_page(request, request.scope["path"].removeprefix("/console/"), depth=path.count("/"))
    return await _file(request, path)


async def page(request: Request) -> Response:
    """A short address without `/console` in front."""
    path = request.scope["path"].lstrip("/")
    return to_page(request, path, depth=path.count("/"), below="console/")


for name in PAGES:
    router.add_api_route(f"/{name}", page, methods=["GET"])
    if name != "playground":
        router.add_api_route(f"/{name}/{{rest:path}}", page, methods=["GET"])


def to_page(request: Request, path: str, *, depth: int, below: str = "") -> Response:
    """Relative, so that it also works behind a proxy that serves us below a prefix."""
    query = urlsplit(str(request.url)).query
    target = quote(path, safe="/:@!$&'()*,;=~") + (f"?{query}" if query else "")
    return RedirectResponse(("../" * depth or "./") + below + f"#/{target}", 307)


async def _file(request: Request, path: str) -> Response:
    try:
        answer = await _files.get_response(path, request.scope)
    except HTTPException as error:
        raise NotFound(f"the console has no file {path[:200]!r}") from error
    # Whole, always: parts of these files are of use to nobody, and the library refuses a range in plain text.
    request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]
    answer.headers["Accept-Ranges"] = "none"
    answer.headers["Content-Security-Policy"] = POLICY
    answer.headers["Cache-Control"] = "no-cache"  # a file's ETag tells whether it is still the same
    answer.headers["Cross-Origin-Opener-Policy"] = "same-origin"
    return answer
