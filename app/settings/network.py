"""Where the server listens, and who may reach it."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from app.settings.values import Theme, absolute, split

_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")
"""As browsers write it: in lower case, without a path. `*` is none."""


class Network(Theme):
    """Addresses, TLS, and what is believed of requests."""

    heading = "Network"

    host: str = Field("127.0.0.1", description="Address to listen on. 0.0.0.0 serves the whole network.")
    port: int = Field(8410, ge=0, le=65535, description="TCP port to listen on. 0 takes any free one.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Host names, besides `host`, loopback names and plain IP addresses, that requests may be addressed "
        "to (protection against DNS rebinding). `*` allows all.",
    )
    tls_cert: Path | None = Field(
        None,
        json_schema_extra={"kind": "FILE"},
        description="Certificate of the server, with the chain to its authority, in PEM: the server then speaks HTTPS "
        "only. Needs `tls_key`. Read once, at start.",
    )
    tls_key: Path | None = Field(
        None,
        json_schema_extra={"kind": "FILE"},
        description="Private key of that certificate, in PEM, without a password.",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Addresses or networks (10.0.0.0/8) of proxies before the server, which terminate TLS. Only their "
        "X-Forwarded-Proto and X-Forwarded-For are believed. None: nobody's.",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins (https://app.example.org) whose web pages may use the API from a browser. None: no other "
        "origin than the server's own.",
    )
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^/]+(/.*)?$",
        description="Address under which clients reach the server, if it is not the one they send requests to (a "
        "proxy). Download addresses begin with it.",
    )

    @field_validator("allowed_hosts", "trusted_proxies", "allowed_origins", mode="before")
    @classmethod
    def _split_lists(cls, value: object) -> object:
        return split(value)

    @field_validator("tls_cert", "tls_key")
    @classmethod
    def _absolute_file(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if info.field_name == "tls_key" and (value is None) != (info.data.get("tls_cert") is None):
            raise ValueError("tls_cert and tls_key are given together or not at all")
        return absolute(value)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            try:
                ipaddress.ip_network(entry)
            except ValueError:
                raise ValueError(f"{entry!r} is neither an IP address nor a network such as 10.0.0.0/8") from None
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not _ORIGIN.fullmatch(entry):
                raise ValueError(f"{entry!r} is not an origin; write each one as https://HOST or https://HOST:PORT")
        return value
