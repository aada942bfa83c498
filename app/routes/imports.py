"""Bringing adapters in from elsewhere."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request

from app.codec import parse_json
from app.codec.multipart import FormRules, receive_form
from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import checked
from app.services.checkpoints import path_of
from app.services.imports import ImportOrder
from schemas.errors import InvalidRequest, TinsmithError
from schemas.requests import ImportCheckpointRequest
from schemas.responses import ImportCheckpointResponse

router = APIRouter(tags=["checkpoints"])

FILE = "adapter_model"
CONFIG_BYTES = 1 << 20
TEXT_BYTES = 64 << 10
_NUMBERS_AND_OBJECTS = ("adapter_config", "ttl_seconds", "user_metadata")
"""Fields that are written as JSON; the others are plain text."""

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="X-Idempotency-Key",
        min_length=1,
        max_length=256,
        description="The same key again gives the same checkpoint.",
    ),
]


@router.post("/checkpoints/import", operation_id="import_checkpoint")
async def import_checkpoint(
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
    idempotency_key: IdempotencyKey = None,
) -> ImportCheckpointResponse:
    """Make a training checkpoint of a PEFT adapter: `adapter_model.safetensors` and `adapter_config.json`."""
    fields = dict.fromkeys(ImportCheckpointRequest.model_fields, TEXT_BYTES) | {"adapter_config": CONFIG_BYTES}
    rules = FormRules(fields, FILE, settings.max_import_bytes)
    declared = request.headers.get("content-length", "0")
    size = int(declared[:20]) if declared.isascii() and declared.isdigit() else 0
    with services.imports.receiving(principal.project_id, size) as upload:
        form = await receive_form(request, rules, upload.file)
        upload.file.close()
        if form.file_sha256 is None:
            raise InvalidRequest(f"{FILE} is missing: the file adapter_model.safetensors", field=FILE)
        body = checked(ImportCheckpointRequest, {name: _value(name, text) for name, text in form.fields.items()})
        order = ImportOrder(principal.project_id, principal.key_id, body, form.file_sha256, idempotency_key)
        made = await services.imports.make(order, upload)
    return ImportCheckpointResponse(
        tinker_path=str(path_of(made)),
        base_model=made.base_model,
        size_bytes=made.size_bytes,
        lora_rank=made.lora.rank,
        train_attn=made.lora.train_attn,
        train_mlp=made.lora.train_mlp,
        train_unembed=made.lora.train_unembed,
    )


def _value(name: str, text: bytes) -> Any:
    try:
        return parse_json(text) if name in _NUMBERS_AND_OBJECTS else text.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} is not UTF-8", field=name) from None
    except TinsmithError as error:
        message = error.message.replace("the body", name)
        raise InvalidRequest(message, field=name, code=error.code) from None
