"""What is refused before any Ray process starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from schemas.errors import Unavailable
from workers.ray.cluster import AUTH_MODE, LOCAL, Cluster


def test_a_cluster_without_token_authentication_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_MODE, "disabled")
    with pytest.raises(Unavailable, match="token authentication") as caught:
        Cluster.connect(LOCAL)
    assert caught.value.hint is not None
    assert AUTH_MODE in caught.value.hint


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_ray(name: str, *more: Any) -> Any:
        return None if name == "ray" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without_ray)
    with pytest.raises(Unavailable, match="Ray is not installed") as caught:
        Cluster.connect("127.0.0.1:6379")
    assert caught.value.hint == "install the extra: pip install 'tinsmith[ray]'"


def test_an_address_where_nothing_listens_is_said_at_once() -> None:
    with pytest.raises(Unavailable, match=r"no Ray cluster can be used at 127\.0\.0\.1:1: "):
        Cluster.connect("127.0.0.1:1")


def test_names_of_applications_are_readable_and_distinct() -> None:
    from workers.ray.application import application_name

    names = {application_name(name) for name in ("acme/tiny", "acme-tiny", "ACME/tiny", "acme/tiny:v2")}
    assert len(names) == 4
    assert all(name.startswith("tinsmith-acme-tiny-") for name in names)
