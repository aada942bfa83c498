"""Whether what clients send can be read on the way: said at start and by `tinsmith doctor`."""

from __future__ import annotations

import ipaddress

from app.settings import Settings


def exposed(settings: Settings) -> str | None:
    """One line of warning if keys and data would leave this machine unencrypted; None if not.

    They would if the server listens on an address that others reach, has no certificate, and knows of no proxy that has
    one.
    """
    if is_loopback(settings.host) or settings.tls_cert is not None or settings.trusted_proxies:
        return None
    return (
        f"keys, prompts and weights travel unencrypted to and from {settings.host}: give --tls-cert and --tls-key, or, "
        "behind a proxy that terminates TLS, its address with --trusted-proxies"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
