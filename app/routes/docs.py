"""The API's description as a page: Swagger UI, from files of this server only.

The files come from the package fastapi-offline, which ships Swagger UI; its own page is not used, since it has a script
inline.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Tinsmith API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="api"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = """"use strict";
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
  layout: "BaseLayout"
});
"""
VENDORED = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
CACHED = {"Cache-Control": "public, max-age=3600"}

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def page() -> Response:
    """The page."""
    return Response(PAGE, media_type="text/html")


@router.get("/docs/start.js")
async def start() -> Response:
    """The script that starts it: nothing is inline, so that the page's policy can forbid it."""
    return Response(START, media_type="text/javascript", headers=CACHED)


@router.get("/docs/swagger-ui.css")
async def style() -> Response:
    """Swagger UI's style."""
    return _vendored("swagger-ui.css")


@router.get("/docs/swagger-ui-bundle.js")
async def bundle() -> Response:
    """Swagger UI."""
    return _vendored("swagger-ui-bundle.js")


def _vendored(name: str) -> Response:
    return Response(_content(name), media_type=VENDORED[name], headers=CACHED)


@cache
def _content(name: str) -> bytes:
    return files("fastapi_offline").joinpath("static", name).read_bytes()
