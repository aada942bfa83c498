"""Where everything is that survives a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from app.settings.values import Seconds, Theme, absolute


class Storage(Theme):
    """The data folder, the database and the storage of checkpoints."""

    heading = "Storage"

    data_dir: Path = Field(
        Path("~/.local/share/tinsmith"),
        description="Folder of everything that survives a restart: database, request bodies, checkpoints, development "
        "key. Created if it is missing.",
    )
    artifacts_url: str | None = Field(
        None,
        pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*$",
        description="S3-compatible storage of checkpoints, as `s3://BUCKET/PREFIX`; unset: the data folder. "
        "Credentials come from the usual AWS variables or files. Needs the extra `s3`. See docs/durability.md.",
    )
    artifacts_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/@?#]+/?$",
        description="Address of that storage, if it is not AWS. Unset: `AWS_ENDPOINT_URL`, else AWS.",
    )
    artifacts_region: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]{1,64}$",
        description="Region of that storage. Unset: `AWS_REGION`, else us-east-1.",
    )
    artifacts_timeout: Seconds = Field(
        30.0,
        description="Seconds that one request to that storage gets, its repeats included; large files are sent in "
        "requests of 8 MiB.",
    )
    artifacts_cache_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        20.0,
        description="GiB in the data folder for copies of checkpoints that are in that storage; the ones unused for "
        "longest give way, those in use stay.",
    )
    database_url: str | None = Field(
        None,
        description="Database of everything that is a row. Unset: SQLite, in the data folder. "
        "postgresql+asyncpg://USER@HOST/DATABASE: PostgreSQL, which several servers may share (docs/postgres.md); a "
        "password is better given in the environment variable, or in a file that PGPASSFILE names.",
    )
    edge_lease: float = Field(
        15.0,
        ge=2,
        le=600,
        allow_inf_nan=False,
        description="Seconds without a sign of life after which other servers on the same PostgreSQL database take "
        "over what a server was doing.",
    )

    @field_validator("data_dir")
    @classmethod
    def _absolute_folder(cls, value: Path) -> Path | None:
        return absolute(value)
