"""Certificates of our own making, for tests of TLS."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """The files of a certificate and its key."""

    cert: Path
    key: Path


def make_certificate(
    folder: Path, name: str = "server", *, days: tuple[float, float] = (-1, 30), password: bytes | None = None
) -> Certificate:
    """A self-signed certificate for localhost and 127.0.0.1, valid from `days[0]` to `days[1]` from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=days[0]))
        .not_valid_after(now + timedelta(days=days[1]))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    made.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    made.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
    made.key.chmod(0o600)
    return made
