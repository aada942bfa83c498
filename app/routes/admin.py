"""Administration of the server itself: which base models it serves. For its operators (`app/permissions.py`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from app.dependencies import ServicesDep, SettingsDep
from app.readiness import describe
from app.routes.bodies import read_model
from app.services.catalog import Served
from app.settings import BaseModelSource, SettingsError, missing_folder
from engines.base_models import has_form
from schemas.errors import InvalidRequest
from schemas.requests import AddBaseModelRequest
from schemas.responses import AdminModel, AdminModelsResponse
from store.added_models import AddedModel

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get("/models", operation_id="list_base_models", response_model_exclude_none=True)
async def list_base_models(services: ServicesDep) -> AdminModelsResponse:
    """Every base model that is served, and how it is."""
    return AdminModelsResponse(models=[_shown(served) for served in await services.catalog.served()])


@router.post("/models", operation_id="add_base_model", response_model_exclude_none=True)
async def add_base_model(request: Request, services: ServicesDep, settings: SettingsDep) -> AdminModel:
    """Serve another base model. Answers when it is loaded, which may take minutes; a restart serves it again."""
    body = await read_model(request, settings, AddBaseModelRequest)
    return _shown(await services.catalog.add(_model(body)))


@router.delete("/models/{name:path}", operation_id="remove_base_model", status_code=204)
async def remove_base_model(
    name: str,
    services: ServicesDep,
    force: Annotated[bool, Query(description="Also if training runs are live on it: they are lost then.")] = False,
) -> Response:
    """Serve a base model no longer that was added while the server ran. Accepted work is finished first."""
    await services.catalog.remove(name, force=force)
    return Response(status_code=204)


def _model(body: AddBaseModelRequest) -> AddedModel:
    """The model, checked as the setting `base_model` is. Raises `InvalidRequest`."""
    if body.path is not None and body.path.startswith((".", "~")):
        raise InvalidRequest(
            f"{body.path[:200]!r} says where a folder is as seen from some place, and the server's is not the caller's",
            field="path",
            hint="give an absolute path, or org/name, or org/name@revision",
        )
    try:
        entry = BaseModelSource(name=body.name, path=body.path, tokenizer_id=body.tokenizer_id)
        missing_folder(entry)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(message, field=str(first["loc"][0])) from None
    except SettingsError as error:
        raise InvalidRequest(str(error), field="path", hint=error.remedy) from None
    if entry.source is not None and not has_form(entry.source):
        raise InvalidRequest(
            f"{entry.source[:200]!r} is neither an existing folder nor a hub id",
            field="name" if body.path is None else "path",
            hint="give the path of a folder with config.json and *.safetensors, or org/name, or org/name@revision",
        )
    return AddedModel(entry.name, entry.source, entry.tokenizer_id)


def _shown(served: Served) -> AdminModel:
    return AdminModel(
        name=served.name,
        state=served.runtime.state,
        detail=describe(served.runtime),
        added=served.added,
        live_runs=served.runs,
    )
