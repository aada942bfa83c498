"""Body of `system`: the server as the console shows it."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from schemas.http.base import ResponseModel


class DiskSpace(ResponseModel):
    """The disk of the data folder, in bytes."""

    total: int = Field(description="Its size.")
    free: int = Field(description="What is free of it.")


class SystemResponse(ResponseModel):
    """Result of `system`."""

    version: str = Field(description="Version of the server.")
    started: datetime = Field(description="Since when it runs.")
    engine: str = Field(description="What trains.")
    sampler: str = Field(description="What samples.")
    database: str = Field(description="`sqlite` or `postgresql`.")
    checkpoints_in: str = Field(description="`folder` or `s3`.")
    settings: dict[str, str | int | float | bool] = Field(
        description="Limits and times that clients meet, by the name of their setting (docs/settings.md)."
    )
    disk: DiskSpace | None = Field(None, description="For the operator only.")
