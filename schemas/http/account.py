"""Bodies about the credential of the caller: tokens in place of keys, and what a key is."""

from __future__ import annotations

from pydantic import Field

from schemas.http.base import RequestModel, ResponseModel


class AuthTokenRequest(RequestModel):
    """Body of `auth/token`: empty. The key is in the header."""


class AuthTokenResponse(ResponseModel):
    """Result of `auth/token`."""

    jwt: str = Field(
        description="A token to send in place of the key, until its `exp`. Its claims are `exp`, `iat`, `iss`, `sub` "
        "(the user), `org_id` (the project), `email` (empty) and `key_id`."
    )


class ApiKeyOrganization(ResponseModel):
    """What a key belongs to."""

    name: str = Field(description="Name of the project.")


class ApiKeyUser(ResponseModel):
    """Whose key it is."""

    email: str = Field(description="Empty: this server knows projects and keys, not people.")


class ApiKeyDetails(ResponseModel):
    """Whom a key belongs to."""

    org_details: ApiKeyOrganization = Field(description="The project.")
    user_details: ApiKeyUser = Field(description="The user.")


class ApiKeyResponse(ResponseModel):
    """Result of GET `auth/apikey/me`."""

    key_id: int = Field(description="A number that stands for the key, made from its id; it lets nobody in.")
    name: str = Field(description="Name of the key.")
    note: str = Field(description="The first characters of the key, to tell keys apart.")
    details: ApiKeyDetails = Field(description="Whom the key belongs to.")
    project_id: str = Field(description="The project that it lets into.")
    role: str = Field(description="What it is in the project.")
    permissions: list[str] = Field(description="What this request's key, or token, may do.")
