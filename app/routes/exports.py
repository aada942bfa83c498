"""Fetching adapters: signed addresses for the owner, files for whoever has an address."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import format_datetime
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.errors import render
from app.routes.checkpoints import CheckpointId, RunId
from app.services.archives import TarStream
from app.services.paths import parse_checkpoint_id
from app.settings import Settings
from schemas.errors import InvalidRequest, RangeNotSatisfiable, TinsmithError
from schemas.responses import CheckpointFile, CheckpointFilesResponse, ErrorResponse, ExternalWeightsUrls

router = APIRouter(tags=["exports"])
BINARY = {"schema": {"type": "string", "format": "binary"}}
BYTES = {"application/octet-stream": BINARY}

files = APIRouter(tags=["exports"])
"""Needs no key: the address is the permission."""


@router.get(
    "/training_runs/{training_run_id}/checkpoints/{checkpoint_id:path}/external_weights_urls",
    operation_id="external_weights_urls",
)
async def external_weights_urls(
    training_run_id: RunId,
    checkpoint_id: CheckpointId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
) -> ExternalWeightsUrls:
    """Addresses of the files of an export. They work without a key, with ranges, until they expire."""
    path = parse_checkpoint_id(training_run_id, checkpoint_id)
    addresses, expires = await services.exports.addresses(principal.project_id, path)
    urls = {name: _absolute(request, settings, address) for name, address in addresses.items()}
    return ExternalWeightsUrls(urls=urls, expires=expires)


@router.get(
    "/training_runs/{training_run_id}/checkpoints/{checkpoint_id:path}/files",
    operation_id="checkpoint_files",
    response_model_exclude_none=True,
)
async def checkpoint_files(
    training_run_id: RunId,
    checkpoint_id: CheckpointId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
) -> CheckpointFilesResponse:
    """The PEFT files of a checkpoint of any kind: sizes, checksums, and addresses that work without a key."""
    path = parse_checkpoint_id(training_run_id, checkpoint_id)
    offered, expires = await services.exports.files(principal.project_id, path)
    files = [
        CheckpointFile(
            name=each.name,
            url=_absolute(request, settings, each.address),
            size_bytes=each.size_bytes,
            sha256=each.sha256,
        )
        for each in offered
    ]
    return CheckpointFilesResponse(files=files, expires=expires)


@router.get(
    "/training_runs/{training_run_id}/checkpoints/{checkpoint_id:path}/archive",
    operation_id="checkpoint_archive",
    status_code=302,
    response_class=Response,
    responses={302: {"description": "`Location` is the address of the archive, `Expires` says when it ends."}},
)
async def checkpoint_archive(
    training_run_id: RunId,
    checkpoint_id: CheckpointId,
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
    relative: Annotated[
        bool, Query(description="`Location` relative to the address that was asked, instead of below `public_url`.")
    ] = False,
) -> Response:
    """The address of a tar of the adapter (PEFT files), which works without a key. What clients before 0.26 ask for."""
    path = parse_checkpoint_id(training_run_id, checkpoint_id)
    address, expires = await services.exports.archive_address(principal.project_id, path)
    location = _relative(request, address) if relative else _absolute(request, settings, address)
    headers = {"Location": location, "Expires": format_datetime(expires, usegmt=True)}
    return Response(status_code=302, headers=headers)


@files.get(
    "/files/{checkpoint_id}/{name}",
    operation_id="download_file",
    response_class=Response,
    responses={
        200: {"content": {**BYTES, "application/x-tar": BINARY}, "description": "The file, or the archive."},
        206: {"content": BYTES, "description": "The range that was asked for."},
        416: {"model": ErrorResponse, "description": "The file has no such range; `Content-Range` tells its size."},
    },
)
async def download_file(
    checkpoint_id: Annotated[str, Path(max_length=64)],
    name: Annotated[str, Path(max_length=64)],
    expires: Annotated[int, Query(ge=0, le=2**53)],
    signature: Annotated[str, Query(max_length=128)],
    services: ServicesDep,
) -> Response:
    """One exported file or archive, by the address that the server gave. A file can be had in ranges."""
    found = await services.exports.download(checkpoint_id, name, expires, signature)
    if not found.is_archive:
        return _HeldFile(found.files[name], found.release, media_type="application/octet-stream", filename=name)
    try:
        archive = TarStream(found.files, found.written)
    finally:
        found.release()
    headers = {"Content-Length": str(archive.size), "Content-Disposition": f'attachment; filename="{name}"'}
    background = BackgroundTask(archive.close)
    return StreamingResponse(archive, media_type="application/x-tar", headers=headers, background=background)


class _HeldFile(FileResponse):
    """A file that may be taken away once it is sent, or once its client has gone."""

    def __init__(self, path: FilePath, release: Callable[[], None], **options: Any) -> None:
        super().__init__(path, **options)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: list[Message] = []

        async def keep_refusals(message: Message) -> None:
            if refused or (message["type"] == "http.response.start" and message["status"] in _REFUSALS):
                refused.append(message)
            else:
                await send(message)

        try:
            await super().__call__(scope, receive, keep_refusals)
        finally:
            self._release()
        if refused:
            await _range_refusal(refused[0], scope)(scope, receive, send)


_REFUSALS: dict[int, type[TinsmithError]] = {400: InvalidRequest, 416: RangeNotSatisfiable}
"""What the library answers to a Range, as plain text."""


def _range_refusal(head: Message, scope: Scope) -> Response:
    """The library's refusal of a Range in the shape of every other error."""
    given = Headers(scope=scope).get("range", "")
    error = _REFUSALS[head["status"]](
        f"Range {given[:100]!r} is not one that this file has", field="Range", hint="write bytes=FIRST-LAST"
    )
    answer = render(error, scope["state"]["request_id"], scope["path"])
    size = Headers(raw=head["headers"]).get("content-range")
    if size is not None:
        answer.headers["Content-Range"] = size
    return answer


def _absolute(request: Request, settings: Settings, address: str) -> str:
    root = (settings.public_url or str(request.base_url)).rstrip("/")
    return f"{root}/api/v1{address}"


def _relative(request: Request, address: str) -> str:
    """An address below the root of the API, as seen from the one that is asked.

    It leads back to this server by the name, port and prefix by which the client reached it, whatever they are: a page
    in a browser may not leave them.
    """
    asked: bytes = request.scope.get("raw_path") or request.scope["path"].encode()  # as sent: a quoted slash is none
    below = asked.partition(b"/api/v1/")[2].count(b"/")
    return f"{'../' * below}{address.removeprefix('/')}"
