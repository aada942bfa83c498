"""Bodies of projects, users and keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field, StringConstraints

from schemas.http.base import Identifier, Items, RequestModel, ResponseModel
from schemas.roles import Permission, Role

DAY = 24 * 3600
MAX_LIFETIME = 10 * 365 * DAY
MAX_OVERLAP = 30 * DAY

Title = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[^\x00-\x20\x7f-\x9f]([^\x00-\x1f\x7f-\x9f]*[^\x00-\x20\x7f-\x9f])?$"
    ),
]
"""A name for people, on one line, without spaces around it."""

Lifetime = Annotated[int, Field(ge=1, le=MAX_LIFETIME)]


class CreateKeyRequest(RequestModel):
    """Body of a new key."""

    name: Title = Field(description="For people, to tell keys apart.")
    role: Role = Field("member", description="What it may do.")
    scopes: Annotated[Items[Permission], Field(min_length=1, max_length=6)] | None = Field(
        None, description="Permissions of the role that it is narrowed to. Absent: all of them."
    )
    user_id: Identifier | None = Field(None, description="The member whose key it is. Absent: a program's.")
    expires_in: Lifetime | None = Field(
        None, description="Seconds until it ends. Absent: until it is revoked, or until the end of the key that asks."
    )


class RotateKeyRequest(RequestModel):
    """Body of the rotation of a key."""

    overlap: Annotated[int, Field(ge=0, le=MAX_OVERLAP)] = Field(
        3600, description="Seconds that the old key still works."
    )
    expires_in: Lifetime | None = Field(
        None, description="Seconds until the new key ends. Absent: when the old one would have."
    )


class KeyInfo(ResponseModel):
    """A key, without anything that would let its reader in."""

    key_id: str = Field(description="Identity of the key.")
    project_id: str = Field(description="The project that it lets into.")
    name: str = Field(description="For people, to tell keys apart.")
    prefix: str = Field(description="Its first characters.")
    role: str = Field(description="What it may do: its own role, or that of its user in the project if that is less.")
    scopes: list[str] | None = Field(None, description="Permissions that it is narrowed to, if it is.")
    user_id: str | None = Field(None, description="Whose it is; absent for a program's.")
    active: bool = Field(description="Whether it lets its holder in now; those of an archived project do not.")
    created_at: AwareDatetime = Field(description="When it was made.")
    last_used_at: AwareDatetime | None = Field(None, description="When it was last used, up to half a minute late.")
    expires_at: AwareDatetime | None = Field(None, description="When it ends.")
    revoked_at: AwareDatetime | None = Field(None, description="When it was revoked.")
    replaced_by: str | None = Field(None, description="The key that took its place in a rotation.")


class KeysResponse(ResponseModel):
    """The keys of a project."""

    keys: list[KeyInfo] = Field(description="Oldest first; those that are over included.")


class NewKeyResponse(ResponseModel):
    """A key that was just made."""

    key: str = Field(description="The key itself. It is shown this once.")
    info: KeyInfo = Field(description="What the key is.")


class CreateProjectRequest(RequestModel):
    """Body of a new project."""

    name: Title = Field(description="For people; no other project has it.")


class ProjectInfo(ResponseModel):
    """A project."""

    project_id: str = Field(description="Identity of the project.")
    name: str = Field(description="For people.")
    created_at: AwareDatetime = Field(description="When it was made.")
    archived_at: AwareDatetime | None = Field(None, description="Since when nobody gets in.")
    live_runs: int = Field(description="Training runs that take work.")


class ProjectsResponse(ResponseModel):
    """Every project of the server."""

    projects: list[ProjectInfo] = Field(description="By name; archived ones included.")


class SetMemberRequest(RequestModel):
    """Body of a membership."""

    role: Role = Field(description="What the user is in the project: the most that the user's keys there may do.")


class MemberInfo(ResponseModel):
    """A user in a project."""

    user_id: str = Field(description="The user.")
    name: str = Field(description="Of the user.")
    role: str = Field(description="What the user is in the project.")
    since: AwareDatetime = Field(description="When the user was added.")


class MembersResponse(ResponseModel):
    """Who belongs to a project."""

    members: list[MemberInfo] = Field(description="By name.")


class CreateUserRequest(RequestModel):
    """Body of a new user."""

    name: Title = Field(description="For people; no other user has it or had it.")


class UserMembership(ResponseModel):
    """A project of a user."""

    project_id: str = Field(description="The project.")
    role: str = Field(description="What the user is there.")


class UserInfo(ResponseModel):
    """A user."""

    user_id: str = Field(description="Identity of the user.")
    name: str = Field(description="For people.")
    created_at: AwareDatetime = Field(description="When it was made.")
    projects: list[UserMembership] = Field(description="Where the user is what.")


class UsersResponse(ResponseModel):
    """Every user of the server."""

    users: list[UserInfo] = Field(description="By name.")
