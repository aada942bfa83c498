"""TLS of the server itself: its certificate and key, looked at before the server starts.

Whether they belong together, are valid today and are for a server is found out by using them: a handshake in memory,
with a client that trusts this certificate alone. Not responsible for proxies that terminate TLS (`--trusted-proxies`).
"""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from app.settings import Settings, SettingsError

MINIMUM = ssl.TLSVersion.TLSv1_2


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """The server's side of TLS; None if it is not configured.

    Raises:
        SettingsError: a file cannot be read, is none of these, they do not belong together, or the certificate is not
            valid today.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    for name, file in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        try:
            file.open("rb").close()
        except OSError as error:
            raise SettingsError(f"{name}: {file} cannot be read ({error.strerror or 'input/output error'})") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM
    encrypted = False

    def no_password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=no_password)
    except ssl.SSLError as error:
        if encrypted:
            raise SettingsError(f"tls_key: {settings.tls_key} is encrypted; give a key without a password") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"tls_key: {settings.tls_key} is not the key of {settings.tls_cert}") from None
        raise SettingsError(
            f"tls_cert, tls_key: {settings.tls_cert} and {settings.tls_key} are not a certificate and its key, in PEM"
        ) from None
    reason = _refused(context, settings.tls_cert)
    if reason is not None:
        raise SettingsError(f"tls_cert: {settings.tls_cert} cannot be used: {reason}")
    return context


def _refused(server: ssl.SSLContext, certificate: Path) -> str | None:
    """Why a client that trusts this certificate would still refuse the server; None if it would not."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is the anchor, whoever signed it
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    try:
        for _ in range(4):  # a handshake takes two rounds
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return (error.reason or "no handshake").lower().replace("_", " ")
    return None
