"""Whom a request says it is for, and where it says it comes from: rebinding, other origins, keys in wrong places."""

from __future__ import annotations

from collections.abc import Iterator

from tests.attacks.catalogue.case import Case

HOSTS = (
    "evil.example",
    "localhost.evil.example",
    "evil.example:80",
    "localhost@evil.example",
    "127.0.0.1.evil.example",
)


def cases() -> Iterator[Case]:
    """With and without a good key."""
    for host in HOSTS:
        for path in ("sessions", "/healthz", "/docs", "/v1/models"):
            yield Case(f"Host {host} at {path}", path, method="GET", headers={"Host": host}, says="not a name")
    for origin in ("http://evil.example", "null", "http://localhost.evil.example"):
        for path in ("create_session", "/v1/completions"):
            yield Case(f"a preflight from {origin} to {path}", path, method="OPTIONS", status=(405,),
                       headers={"Origin": origin, "Access-Control-Request-Method": "POST"})  # fmt: skip
    for what, headers in (
        ("no key", {}),
        ("an empty key", {"X-API-Key": ""}),
        ("a key in a cookie", {"Cookie": "X-API-Key=tml-x"}),
        ("a key in another header", {"Api-Key": "tml-x"}),
        ("a key of 100,000 characters", {"X-API-Key": "tml-" + "x" * 30_000}),
        ("a lower-case scheme", {"Authorization": "bearer tml-x"}),
        ("another scheme", {"Authorization": "Basic dG1sOng="}),
        ("a token without a signature", {"Authorization": "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJ4In0."}),
        ("a statement of SQL as key", {"X-API-Key": "tml-' OR '1'='1"}),
    ):
        for path in ("sessions", "admin/models", "/v1/models", "/anthropic/api/v1/nothing", "nothing"):
            yield Case(f"{what} at {path}", path, method="GET", headers=headers, key=False, status=(401,))
    for header in ("X-Forwarded-User", "X-Project-Id", "X-Original-URL", "X-HTTP-Method-Override"):
        yield Case(f"{header} instead of a key", "sessions", method="GET", headers={header: "admin"}, key=False,
                   status=(401,))  # fmt: skip
