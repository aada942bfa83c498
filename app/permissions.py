"""What every route needs, and what every role may do: one table for each, enforced in one place for all routes.

A route that is not in the table answers nobody, and the application is not even put together with it. Roles say what
a key may do in its own project; the scopes of a key narrow that down. Not responsible for who somebody is (`auth.py`),
nor for which objects belong to whom: the services look everything up by project.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts

from app.principal import Principal
from app.public import is_public
from schemas.errors import Forbidden
from schemas.roles import PERMISSIONS, ROLES, Permission, Role

ROLE_PERMISSIONS: Mapping[Role, frozenset[Permission]] = {
    "read-only": frozenset({"read"}),
    "member": frozenset({"read", "train", "sample", "checkpoints"}),
    "owner": frozenset({"read", "train", "sample", "checkpoints", "keys"}),
    "admin": frozenset(PERMISSIONS),
}

NOT_BY_TOKEN: frozenset[Permission] = frozenset({"keys", "admin"})
"""What needs the key itself: a token is short-lived, and must not be turned into keys that are not."""

PUBLIC = frozenset({"healthz", "readyz", "download_file", "download_session_trace"})
"""Operations that need no key; their paths are `app.public.PUBLIC_PATHS` and `PUBLIC_PREFIX`."""
ANY_KEY: tuple[Permission, ...] = ()
"""Every valid key, whatever it may do."""
_WORK: tuple[Permission, ...] = ("train", "sample", "checkpoints")
_SEE_RESULTS: tuple[Permission, ...] = ("read", *_WORK)

ROUTES: Mapping[str, tuple[Permission, ...]] = {
    # By operation id; one of the permissions is needed. First: what a client does before and beside its work
    "client_config": ANY_KEY,
    "client_dynamic_config": ANY_KEY,
    "auth_token": ANY_KEY,
    "get_own_api_key": ANY_KEY,
    "delete_own_api_key": ANY_KEY,
    "telemetry": ANY_KEY,
    "get_server_capabilities": ANY_KEY,
    "create_session": _WORK,
    "session_heartbeat": _WORK,
    "finish_session": _WORK,
    "set_session_project": _WORK,
    "tokenize": _SEE_RESULTS,
    "retrieve_future": _SEE_RESULTS,
    "retrieve_futures": _SEE_RESULTS,
    "cancel_future": _WORK,
    # looking
    "search_sessions": ("read",),
    "list_sessions": ("read",),
    "get_session": ("read",),
    "export_session_trace": ("read",),
    "get_throughput": ("read",),
    "get_limits": _SEE_RESULTS,
    "metrics": ("admin",),
    "get_system": ("read",),
    "get_queue": ("read",),
    "get_run_metrics": ("read",),
    "follow_run_metrics": ("read",),
    "list_training_runs": ("read",),
    "get_training_run": ("read",),
    "list_checkpoints": ("read",),
    "list_run_checkpoints": ("read",),
    "get_audit_log": ("read",),
    "get_billing_usage": ("read",),
    "get_current_checkpoint_storage": ("read",),
    "get_info": _SEE_RESULTS,
    "weights_info": _SEE_RESULTS,
    "get_sampler": ("read", "sample"),
    "openai_list_models": ("read", "sample"),
    "openai_get_model": ("read", "sample"),
    # training
    "create_model": ("train",),
    "unload_model": ("train",),
    "forward_backward": ("train",),
    "forward": ("train",),
    "optim_step": ("train",),
    "zero_grad": ("train",),
    "create_custom_loss": ("train",),
    "save_weights": ("train",),
    "save_weights_for_sampler": ("train",),
    "load_weights": ("train",),
    # sampling
    "create_sampling_session": ("sample",),
    "join_sampling_session": ("sample",),
    "asample": ("sample",),
    "openai_completions": ("sample",),
    "openai_chat_completions": ("sample",),
    "anthropic_messages": ("sample",),
    "anthropic_count_tokens": ("sample",),
    # saved weights: taking them along, sharing them, ending them
    "save_weights_external": ("checkpoints",),
    "external_weights_urls": ("checkpoints",),
    "checkpoint_archive": ("checkpoints",),
    "checkpoint_files": ("checkpoints",),
    "import_checkpoint": ("checkpoints",),
    "copy_weights": ("checkpoints",),
    "set_checkpoint_ttl": ("checkpoints",),
    "publish_checkpoint": ("checkpoints",),
    "unpublish_checkpoint": ("checkpoints",),
    "delete_checkpoint": ("checkpoints",),
    # keys of the own project
    "list_keys": ("keys",),
    "create_key": ("keys",),
    "revoke_key": ("keys",),
    "rotate_key": ("keys",),
    # the server
    "list_base_models": ("admin",),
    "add_base_model": ("admin",),
    "remove_base_model": ("admin",),
    "admin_list_projects": ("admin",),
    "admin_create_project": ("admin",),
    "admin_get_project": ("admin",),
    "admin_archive_project": ("admin",),
    "admin_list_keys": ("admin",),
    "admin_create_key": ("admin",),
    "admin_revoke_key": ("admin",),
    "admin_rotate_key": ("admin",),
    "admin_list_members": ("admin",),
    "admin_set_member": ("admin",),
    "admin_remove_member": ("admin",),
    "admin_list_users": ("admin",),
    "get_project_limits": ("admin",),
    "set_project_limits": ("admin",),
    "clear_project_limits": ("admin",),
    "get_key_limits": ("admin",),
    "set_key_limits": ("admin",),
    "clear_key_limits": ("admin",),
    "admin_create_user": ("admin",),
    "admin_delete_user": ("admin",),
}
"""Every other route."""

UNDESCRIBED_PATHS = frozenset({"/openapi.json"})
"""A route that is not ours to name; it needs no key."""


def held(role: str, scopes: Iterable[str] | None = None) -> frozenset[Permission]:
    """What a key of this role, narrowed to these scopes (None = not narrowed), may do. An unknown role: nothing."""
    allowed = ROLE_PERMISSIONS.get(cast(Role, role), frozenset())
    return allowed if scopes is None else allowed & frozenset(cast(Iterable[Permission], scopes))


def roles_with(needed: Iterable[Permission]) -> list[Role]:
    """The roles that have one of these permissions, the least first."""
    return [role for role in ROLES if ROLE_PERMISSIONS[role] & frozenset(needed)]


async def permit(request: Request) -> None:
    """Refuse the request unless its key may use the route that it has reached. Runs before any body is read.

    Raises:
        Forbidden: it may not; says what is missing, and which role has it.
    """
    operation_id = getattr(request.scope.get("route"), "operation_id", None) or ""
    if operation_id in getattr(request.app.state, "public_operations", PUBLIC) or (
        not operation_id and is_public(request.scope["path"])
    ):
        return
    needed = ROUTES.get(operation_id)
    principal = cast(Principal | None, getattr(request.state, "principal", None))
    if needed is None or principal is None:
        raise Forbidden("nobody may use this route", hint="it has no entry in the table of permissions")
    check(principal, needed)


def check(principal: Principal, needed: tuple[Permission, ...]) -> None:
    """Raise `Forbidden` unless the principal has one of these permissions (none needed: everybody has)."""
    if not needed or principal.permissions & frozenset(needed):
        return
    missing = " or ".join(needed)
    roles = roles_with(needed)
    if held(principal.role) & frozenset(needed):
        if principal.until is not None and frozenset(needed) <= NOT_BY_TOKEN:
            raise Forbidden(f"the permission {missing} needs the API key itself, not a token", hint="send the key")
        raise Forbidden(
            f"this key lacks the permission {missing}: it is narrowed to the scopes {_list(principal.scopes or ())}",
            hint=f"use a key of role {' or '.join(roles)} without scopes, or with the scope {missing}",
        )
    hint = f"the role {roles[0]} has it" if len(roles) == 1 else f"the roles {_list(roles)} have it"
    if "admin" in needed:
        hint += "; so has the development key, in the file dev_key of the data folder"
    raise Forbidden(f"this key lacks the permission {missing}: its role is {principal.role or 'unknown'}", hint=hint)


def check_routes(app: FastAPI) -> None:
    """Raise `RuntimeError` if a route is not in the table, or could have its body read before it is looked up there."""
    found: set[str] = set()
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, APIRoute):
            if context.path not in UNDESCRIBED_PATHS:
                raise RuntimeError(f"{context.path} is no API route: nothing says who may use it")
            continue
        operation_id = route.operation_id or ""
        if not operation_id and not route.include_in_schema and is_public(route.path):
            continue  # a page or a file for browsers: the same for everybody
        if operation_id not in ROUTES and operation_id not in PUBLIC:
            raise RuntimeError(f"{route.path}: operation {operation_id!r} has no entry in app/permissions.py")
        if route.body_field is not None:
            raise RuntimeError(
                f"{route.path}: its body would be read before permissions are looked at; read it by hand"
            )
        found.add(operation_id)
    stale = sorted({*ROUTES, *PUBLIC} - found)
    if stale:
        raise RuntimeError(f"app/permissions.py names operations that do not exist: {', '.join(stale)}")


def _list(names: Iterable[str]) -> str:
    *head, last = list(names) or ["none"]
    return f"{', '.join(head)} and {last}" if head else last
