"""TLS: what is refused at start, and a server that speaks it, with a plain client and with `tinsmith demo`'s parts."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.exposure import exposed
from app.settings import Settings, SettingsError
from app.tls import server_context
from tests.support.certificates import Certificate, make_certificate

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from app.main import create_app
from app.serve import run
from app.settings import Settings
from tests.app.conftest import idle_group

values = dict(item.split("=", 1) for item in sys.argv[2:])
settings = Settings(port=0, data_dir=Path(sys.argv[1]), base_model=["acme/tiny=/nowhere"], shutdown_grace=5, **values)
sys.exit(run(settings, lambda s: create_app(s, group_factory=idle_group)))
"""


def settings_of(folder: Path, certificate: Certificate) -> Settings:
    return Settings(data_dir=folder / "data", tls_cert=certificate.cert, tls_key=certificate.key)


def reason(folder: Path, certificate: Certificate) -> str:
    with pytest.raises(SettingsError) as failure:
        server_context(settings_of(folder, certificate))
    return str(failure.value)


def test_a_good_certificate_is_taken(tmp_path: Path) -> None:
    context = server_context(settings_of(tmp_path, make_certificate(tmp_path)))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert server_context(Settings(data_dir=tmp_path)) is None


def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    one, other = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "other")
    assert reason(tmp_path, Certificate(one.cert, other.key)) == f"tls_key: {other.key} is not the key of {one.cert}"
    past = make_certificate(tmp_path, "past", days=(-3, -1))
    assert reason(tmp_path, past) == f"tls_cert: {past.cert} cannot be used: certificate has expired"
    future = make_certificate(tmp_path, "future", days=(1, 3))
    assert reason(tmp_path, future).endswith("certificate is not yet valid")
    locked = make_certificate(tmp_path, "locked", password=b"words")
    assert reason(tmp_path, locked) == f"tls_key: {locked.key} is encrypted; give a key without a password"
    missing = Certificate(tmp_path / "no.pem", one.key)
    assert reason(tmp_path, missing) == f"tls_cert: {missing.cert} cannot be read (No such file or directory)"
    (tmp_path / "text.pem").write_text("words")
    assert "are not a certificate and its key" in reason(tmp_path, Certificate(tmp_path / "text.pem", one.key))


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_one_without_the_other_is_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ValueError, match="given together or not at all"):
        Settings(data_dir=tmp_path, **{given: tmp_path / "file"})


def test_what_leaves_this_machine_unencrypted_is_said(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    tls = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        assert exposed(Settings(host=host)) is None
    for host in ("0.0.0.0", "::", "10.1.2.3", "gpu.example.org"):
        assert "travel unencrypted" in (exposed(Settings(host=host)) or "")
        assert exposed(Settings(host=host, **tls)) is None  # type: ignore[arg-type]
        assert exposed(Settings(host=host, trusted_proxies=("10.0.0.1",))) is None


@dataclass(frozen=True)
class Started:
    """A server process on TLS and where it is."""

    url: str
    key: str
    certificate: Certificate


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One server with a certificate, for all that only asks it something."""
    folder = tmp_path_factory.mktemp("tls")
    certificate = make_certificate(folder)
    given = [f"tls_cert={certificate.cert}", f"tls_key={certificate.key}"]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder / "data"), *given], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[0] == "ready"
        yield Started(words[1], (folder / "data" / "dev_key").read_text().strip(), certificate)
    finally:
        process.terminate()
        process.wait(30)


def test_the_ready_line_and_links_are_https(started: Started) -> None:
    assert started.url.startswith("https://127.0.0.1:")
    trust = ssl.create_default_context(cafile=str(started.certificate.cert))
    answer = httpx.get(f"{started.url}/readyz", verify=trust)
    assert answer.status_code == 200
    assert answer.headers["strict-transport-security"] == "max-age=31536000"
    named = httpx.get(f"{started.url.replace('127.0.0.1', 'localhost')}/readyz", verify=trust)
    assert "strict-transport-security" not in named.headers, "it would bind every other server on this machine"


def test_a_client_that_does_not_trust_it_sends_nothing(started: Started) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{started.url}/readyz")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_plain_http_and_old_tls_get_no_answer(started: Started) -> None:
    host, port = started.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        plain.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not plain.recv(4096).startswith(b"HTTP")
    old = ssl.create_default_context(cafile=str(started.certificate.cert))
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection((host, int(port)), timeout=10) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain, server_hostname="localhost")


def test_the_sdk_and_the_command_trust_what_ssl_cert_file_names(started: Started) -> None:
    script = (
        "import sys, tinker\n"
        "client = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])\n"
        "print(client.get_server_capabilities().supported_models[0].model_name)\n"
        "from app.commands.client import connect\n"
        "print(connect(sys.argv[1], sys.argv[2]).get('get_server_capabilities')['supported_models'][0]['model_name'])\n"
    )
    environment = {**os.environ, "SSL_CERT_FILE": str(started.certificate.cert), "TINKER_TELEMETRY": "0"}
    command = [sys.executable, "-c", script, started.url, started.key]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "acme/tiny\nacme/tiny\n", done.stderr[-2000:]


def test_a_server_that_cannot_use_its_certificate_does_not_start(tmp_path: Path) -> None:
    past = make_certificate(tmp_path, "past", days=(-3, -1))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "data"), f"tls_cert={past.cert}", f"tls_key={past.key}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    cause, remedy = done.stderr.splitlines()
    assert cause == f"error: cannot start: tls_cert: {past.cert} cannot be used: certificate has expired"
    assert remedy.startswith("help: ")
    assert not (tmp_path / "data").exists()


def test_a_server_on_every_address_warns_once(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "data"), "host=0.0.0.0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert errors.count("warning: keys, prompts and weights travel unencrypted to and from 0.0.0.0") == 1
