"""Tokens in place of keys: who gets one, which are believed, and when that ends. And the key that shows itself."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import jwt
import pytest

from app.auth import Authenticator
from app.services.tokens import ISSUER, TYPE, Tokens
from app.settings import Settings
from schemas.errors import InvalidToken
from store.keys import create_key, ensure_project, list_keys, revoke_key
from store.records import KeyRecord
from tests.app.conftest import BASE, Edge, running

NOW = datetime(2026, 7, 13, 10, 30, tzinfo=UTC)
SECRET = b"s" * 32
KEY = KeyRecord("0" * 32, "p" * 32, "laptop", "tml-abcdefgh", NOW, None, None, None, "member")


def tokens(now: list[datetime] | None = None, *, secret: bytes = SECRET, lifetime: float = 3600) -> Tokens:
    clock = now if now is not None else [NOW]
    return Tokens(secret, lifetime, lambda: clock[0])


def claims(token: str) -> dict[str, Any]:
    """The payload, as the SDK reads it: without looking at the signature."""
    payload = token.split(".")[1]
    return dict(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))))


def with_token(edge: Edge, token: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=edge.client._transport, base_url=BASE, headers={"X-API-Key": token})


@pytest.fixture
async def jwt_edge(make_settings: Callable[..., Settings]) -> Any:
    async with running(make_settings(pjwt_auth_enabled=True)) as edge:
        yield edge


async def exchange(client: httpx.AsyncClient) -> str:
    answer = await client.post("auth/token", json={})
    assert answer.status_code == 200, answer.text
    assert list(answer.json()) == ["jwt"]
    return str(answer.json()["jwt"])


def test_a_token_says_whose_it_is_for_its_lifetime() -> None:
    now = [NOW]
    made = tokens(now)
    token = made.issue(KEY)
    seconds = int(NOW.timestamp())
    assert claims(token) == {
        "iss": ISSUER,
        "iat": seconds,
        "exp": seconds + 3600,
        "sub": f"tml:user:{KEY.project_id}",
        "org_id": KEY.project_id,
        "email": "",
        "key_id": KEY.key_id,
    }
    assert token.startswith("eyJ")
    identity = made.read(token)
    assert identity is not None
    assert (identity.project_id, identity.key_id) == (KEY.project_id, KEY.key_id)
    assert identity.until == NOW + timedelta(hours=1)
    now[0] = NOW + timedelta(seconds=3599)
    assert made.read(token) is not None
    now[0] = NOW + timedelta(seconds=3600)
    assert made.read(token) is None


def test_a_token_ends_no_later_than_its_key_or_the_token_it_was_made_from() -> None:
    soon, sooner = NOW + timedelta(minutes=9), NOW + timedelta(minutes=5)
    dying = replace(KEY, expires_at=soon)
    assert claims(tokens().issue(dying))["exp"] == int(soon.timestamp())
    assert claims(tokens().issue(dying, until=sooner))["exp"] == int(sooner.timestamp())
    assert claims(tokens().issue(KEY, until=NOW + timedelta(days=9)))["exp"] == int(NOW.timestamp()) + 3600


def signed(secret: bytes = SECRET, algorithm: str = "HS256", typ: str | None = TYPE, **changes: Any) -> str:
    values = {**claims(tokens().issue(KEY)), **changes}
    values = {name: value for name, value in values.items() if value is not None}
    return jwt.encode(values, secret, algorithm=algorithm, headers={"typ": typ} if typ else None)


def unsigned(algorithm: str) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': algorithm, 'typ': TYPE})}.{part(claims(tokens().issue(KEY)))}."


def test_the_forger_of_these_tests_can_sign() -> None:
    assert tokens().read(signed()) is not None


@pytest.mark.parametrize(
    "token",
    [
        signed(b"t" * 32),
        signed(algorithm="HS512"),
        signed(algorithm="HS384"),
        signed(typ=None),
        signed(typ="tinsmith-export"),
        signed(iss="another"),
        signed(iss=None),
        signed(exp=None),
        signed(exp=int(NOW.timestamp())),
        signed(exp=2**70),
        signed(exp="9999999999999"),
        signed(iat=None),
        signed(sub=None),
        signed(key_id=None),
        signed(key_id=7),
        signed(org_id=None),
        unsigned("none"),
        unsigned("None"),
        unsigned("HS256"),
        "eyJ",
        "eyJ.eyJ.eyJ",
        "eyJ" + "x" * 2000,
        "eyJ\xff\xfe.a.b",
        "",
    ],
)
def test_what_is_not_believed(token: str) -> None:
    assert tokens().read(token) is None


def test_an_altered_token_is_not_believed() -> None:
    head, body, signature = tokens().issue(KEY).split(".")
    other = tokens().issue(replace(KEY, project_id="q" * 32)).split(".")[1]
    assert tokens().read(f"{head}.{other}.{signature}") is None
    for place in range(0, len(body), 7):
        changed = body[:place] + ("A" if body[place] != "A" else "B") + body[place + 1 :]
        assert tokens().read(f"{head}.{changed}.{signature}") is None


async def test_a_key_is_exchanged_and_the_token_gets_in_like_the_key(jwt_edge: Edge) -> None:
    assert (await jwt_edge.client.post("client/config", json={})).json()["pjwt_auth_enabled"] is True
    token = await exchange(jwt_edge.client)
    assert jwt_edge.app.state.dev_key not in token
    session_id = await jwt_edge.new_session()
    async with with_token(jwt_edge, token) as client:
        assert (await client.get("sessions")).json() == {"sessions": [session_id]}
    bearer = await jwt_edge.without_key().get("sessions", headers={"Authorization": f"Bearer {token}"})
    assert bearer.status_code == 200
    assert (await jwt_edge.client.get("sessions")).status_code == 200  # plain keys go on working
    stranger = await jwt_edge.other_project()
    async with with_token(jwt_edge, await exchange(stranger)) as client:
        assert (await client.get("sessions")).json() == {"sessions": []}


async def test_a_token_made_from_a_token_ends_with_it(jwt_edge: Edge) -> None:
    token = await exchange(jwt_edge.client)
    async with with_token(jwt_edge, token) as client:
        again = await exchange(client)
    assert claims(again)["exp"] <= claims(token)["exp"]


async def test_a_bad_token_is_answered_so_that_the_client_exchanges_again(jwt_edge: Edge) -> None:
    token = await exchange(jwt_edge.client)
    for bad in (token[:-2], signed(b"t" * 32), "eyJ"):
        async with with_token(jwt_edge, bad) as client:
            answer = await client.get("sessions")
        assert answer.status_code == 401
        assert 'error="invalid_token"' in answer.headers["www-authenticate"]
        assert answer.json()["error"]["code"] == "invalid_token"
    async with with_token(jwt_edge, "tml-wrong") as client:
        answer = await client.post("auth/token", json={})
    assert answer.status_code == 401
    assert "invalid_token" not in answer.headers["www-authenticate"]


async def test_a_token_is_worth_nothing_once_its_key_is_revoked_or_has_ended(jwt_edge: Edge) -> None:
    store, now = jwt_edge.app.state.store, [0.0]
    made = jwt_edge.app.state.services.tokens
    authenticator = Authenticator(store, tokens=made, ttl=2.0, clock=lambda: now[0])

    async def make(db: Any) -> tuple[str, str, str]:
        project_id = await ensure_project(db, "revoked")
        return (project_id, *await create_key(db, project_id, "key"))

    project_id, key_id, _ = await store.write(make)
    [record] = await store.read(lambda db: list_keys(db, project_id))
    token = made.issue(record)
    found = await authenticator.principal(token)
    assert found is not None
    assert (found.project_id, found.key_id) == (project_id, key_id)
    assert found.until is not None
    await store.write(lambda db: revoke_key(db, project_id, key_id, datetime.now(UTC)))
    assert await authenticator.principal(token) == found  # within the cache time
    now[0] = 2.1
    with pytest.raises(InvalidToken):
        await authenticator.principal(token)
    for stranger in (replace(record, project_id="other"), replace(record, key_id="nobody")):
        with pytest.raises(InvalidToken):
            await authenticator.principal(made.issue(stranger))


async def test_tokens_are_off_unless_the_operator_wants_them(edge: Edge) -> None:
    assert (await edge.client.post("client/config", json={})).json()["pjwt_auth_enabled"] is False
    answer = await edge.client.post("auth/token", json={})
    assert answer.status_code == 404
    assert "pjwt_auth_enabled" in answer.json()["detail"]
    store = edge.app.state.store
    principal = await edge.app.state.authenticator.principal(edge.app.state.dev_key)
    [record] = await store.read(lambda db: list_keys(db, principal.project_id))
    async with with_token(edge, edge.app.state.services.tokens.issue(record)) as client:
        refused = await client.get("sessions")
    assert refused.status_code == 401
    assert "invalid_token" not in refused.headers["www-authenticate"]


async def test_the_secret_is_a_private_file_that_stays(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings(pjwt_auth_enabled=True)
    async with running(settings) as edge:
        token = await exchange(edge.client)
    file = settings.data_dir / "token_secret"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert len(file.read_bytes()) == 32
    async with running(settings) as edge, with_token(edge, token) as client:
        assert (await client.get("sessions")).status_code == 200


async def test_an_unknown_field_of_the_exchange_is_named(jwt_edge: Edge) -> None:
    answer = await jwt_edge.client.post("auth/token", json={"lifetime": 5})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "lifetime")
    assert (await jwt_edge.client.post("auth/token")).status_code == 200


async def test_a_key_shows_itself(edge: Edge) -> None:
    shown = (await edge.client.get("auth/apikey/me")).json()
    assert isinstance(shown.pop("key_id"), int)
    assert edge.app.state.dev_key.startswith(shown["note"].removesuffix("..."))
    assert len(shown.pop("note")) < 20
    assert len(shown.pop("project_id")) == 32
    assert shown == {
        "name": "dev",
        "role": "admin",
        "permissions": ["read", "train", "sample", "checkpoints", "keys", "admin"],
        "details": {"org_details": {"name": "default"}, "user_details": {"email": ""}},
    }
    other = await edge.other_project("theirs")
    assert (await other.get("auth/apikey/me")).json()["details"]["org_details"] == {"name": "theirs"}


async def test_a_key_ends_itself_and_its_tokens_at_once(jwt_edge: Edge) -> None:
    client = await jwt_edge.other_project()
    token = await exchange(client)
    async with with_token(jwt_edge, token) as by_token:
        assert (await by_token.get("sessions")).status_code == 200
        assert (await client.delete("auth/apikey/me")).status_code == 204
        assert (await by_token.get("sessions")).status_code == 401
    assert (await client.get("sessions")).status_code == 401
    assert (await client.delete("auth/apikey/me")).status_code == 401
    assert (await jwt_edge.client.get("sessions")).status_code == 200  # another key is not touched
