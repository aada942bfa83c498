"""Bodies of the administration of base models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.http.base import RequestModel, ResponseModel


class AddBaseModelRequest(RequestModel):
    """Body of `POST admin/models`."""

    name: str = Field(max_length=128, description="The name that clients use, such as org/model.")
    path: str | None = Field(
        None,
        max_length=4096,
        description="A folder of the server's machine, or a hub id; without it the name is the hub id.",
    )
    tokenizer_id: str | None = Field(None, max_length=512, description="What `get_info` reports as tokenizer.")


class AdminModel(ResponseModel):
    """A served base model."""

    name: str = Field(description="As clients say it.")
    state: Literal["starting", "ready", "restarting", "failed"] = Field(description="Whether it takes work.")
    detail: str | None = Field(None, description="In words, why it is not ready.")
    added: bool = Field(description="Whether it was added while the server ran, and not by its settings.")
    live_runs: int = Field(description="Training runs on it that take work.")


class AdminModelsResponse(ResponseModel):
    """Result of `GET admin/models`."""

    models: list[AdminModel] = Field(description="In the order in which they came.")
