"""What a request says beside its path and body: no query parameter that the route does not have, and nothing twice.

One table for all routes, made from the parameters and headers that each of them declares, and one dependency of the
whole application that looks requests up there, after their permissions and before their body. A route that is not in
the table takes no query parameters. Headers that a route does not declare mean nothing to it, as everywhere in HTTP.
Not responsible for what values mean: FastAPI reads them as the routes declare them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args, get_origin

from fastapi import FastAPI, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Header, Query
from fastapi.routing import APIRoute, iter_route_contexts

from app.public import is_page
from schemas.errors import InvalidRequest

SHOWN = 100
"""Characters of a name or value that an error repeats."""
READ_ONCE = frozenset({"content-type", "content-encoding", "anthropic-version"})
"""Headers that say how to read the body: two programs on the way could each believe another one of them."""


class Written(NamedTuple):
    """How a value is written."""

    pattern: re.Pattern[str]
    words: str


FORMS: Mapping[type, Written] = {
    int: Written(re.compile(r"0|-?[1-9][0-9]*"), "a valid integer, in decimal digits"),
    bool: Written(re.compile(r"true|false"), "true or false"),
}
"""By type. Left to themselves readers also take `1_000`, `+1`, `007` and `yes`: a signed address would have twins."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The query parameters of a route, those among them that may be given more than once, how those are written that
    have one way to be, and the headers of the route."""

    names: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    forms: Mapping[str, Written] = field(default_factory=dict)
    headers: frozenset[str] = frozenset()


def install(app: FastAPI) -> None:
    """Make the table of all routes that `app` has by now: by operation id, since some have several addresses."""
    table: dict[str, Taken] = {}
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and route.operation_id:
            table[route.operation_id] = _taken(route)
    app.state.parameters = table


async def check(request: Request) -> None:
    """Raise `InvalidRequest` for a query parameter that the route does not have, that has no name, is given twice or is
    a number or a truth in another than its one form, and for a header of the route's that is given twice.

    Files for browsers are left out (`app.public.is_page`): a page may be asked for with anything behind the `?`, as the
    short addresses of the console are, and what it shows depends on nothing of it.
    """
    operation_id = getattr(request.scope.get("route"), "operation_id", None) or ""
    if not operation_id and is_page(request.scope["path"]):
        return
    table: Mapping[str, Taken] = request.app.state.parameters
    taken = table.get(operation_id, Taken())
    if request.scope.get("query_string"):
        _check_query(request.query_params.multi_items(), taken)
    _check_headers(request.headers.raw, taken)


def _check_query(given: Iterable[tuple[str, str]], taken: Taken) -> None:
    seen: dict[str, str] = {}
    for name, value in given:
        if name not in taken.names:
            raise _unknown(name, value, taken)
        if name in seen and name not in taken.lists:
            raise InvalidRequest(
                f"{name} is given twice ({seen[name][:SHOWN]!r} and {value[:SHOWN]!r}); it is taken once",
                field=name,
                code="repeated_parameter",
            )
        seen[name] = value
    for name, form in taken.forms.items():
        if name in seen and not form.pattern.fullmatch(seen[name]):
            raise InvalidRequest(f"{name}: input should be {form.words}; got {seen[name][:SHOWN]!r}", field=name)


def _check_headers(given: Iterable[tuple[bytes, bytes]], taken: Taken) -> None:
    seen: set[str] = set()
    for raw, _ in given:
        name = raw.decode("latin-1")
        if name in seen and (name in taken.headers or name in READ_ONCE):
            # Without its values: one of these headers holds a key.
            raise InvalidRequest(
                f"the header {name} is given twice; it is taken once", field=name, code="repeated_parameter"
            )
        seen.add(name)


def _unknown(name: str, value: str, taken: Taken) -> InvalidRequest:
    what = f"{name[:SHOWN]!r} is not a query parameter of this route" if name else "a query parameter has no name"
    accepted = f"accepted are: {', '.join(sorted(taken.names))}" if taken.names else "it takes none"
    return InvalidRequest(
        f"{what} (got {value[:SHOWN]!r}); {accepted}",
        field=name[:SHOWN] or None,
        code="unsupported_parameter",
    )


def _taken(route: APIRoute) -> Taken:
    fields = get_flat_params(route.dependant)
    query = [each for each in fields if isinstance(each.field_info, Query)]
    return Taken(
        frozenset(each.alias for each in query),
        frozenset(each.alias for each in query if _is_list(each.field_info.annotation)),
        {each.alias: FORMS[kind] for each in query for kind in FORMS if _is(kind, each.field_info.annotation)},
        frozenset(each.alias.lower() for each in fields if isinstance(each.field_info, Header)),
    )


def _is_list(annotation: Any) -> bool:
    """Whether a parameter of this type is read from all its occurrences, as `list[...]` and `list[...] | None` are."""
    return get_origin(annotation) is list or any(_is_list(each) for each in get_args(annotation))


def _is(kind: type, annotation: Any) -> bool:
    """Whether a parameter of this type is one of `kind`, or nothing."""
    return annotation is kind or (kind in get_args(annotation) and get_origin(annotation) is not list)
