"""Fetching exported adapters: signed addresses for the owner, files for whoever has an address."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.checkpoints import CheckpointId, RunId
from app.services.paths import parse_checkpoint_id
from schemas.responses import ExternalWeightsUrls

router = APIRouter(tags=["exports"])
BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

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
    root = (settings.public_url or str(request.base_url)).rstrip("/")
    return ExternalWeightsUrls(
        urls={name: f"{root}/api/v1{address}" for name, address in addresses.items()}, expires=expires
    )


@files.get(
    "/files/{checkpoint_id}/{name}",
    operation_id="download_file",
    response_class=FileResponse,
    responses={
        200: {"content": BYTES, "description": "The file."},
        206: {"content": BYTES, "description": "The range that was asked for."},
    },
)
async def download_file(
    checkpoint_id: Annotated[str, Path(max_length=64)],
    name: Annotated[str, Path(max_length=64)],
    expires: Annotated[int, Query(ge=0, le=2**53)],
    signature: Annotated[str, Query(max_length=128)],
    services: ServicesDep,
) -> FileResponse:
    """One exported file, by the address that `external_weights_urls` gave."""
    path = await services.exports.file(checkpoint_id, name, expires, signature)
    return FileResponse(path, media_type="application/octet-stream", filename=name)
