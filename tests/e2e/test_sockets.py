"""What a started server listens on: the API's port and nothing else, its worker processes included."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import MODEL
from tests.support.server import RunningServer, serve


def family(server: RunningServer) -> list[psutil.Process]:
    """The server's process and all that it started."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def doors(processes: list[psutil.Process]) -> set[tuple[str, str, int]]:
    """(protocol, address, port) of every socket of the internet family that others can send to."""
    found: set[tuple[str, str, int]] = set()
    for process in processes:
        for one in process.net_connections(kind="inet"):
            udp = one.type.name == "SOCK_DGRAM"
            if one.laddr and (udp or one.status == psutil.CONN_LISTEN):
                found.add(("udp" if udp else "tcp", one.laddr.ip, one.laddr.port))
    return found


def port_of(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_only_the_port_of_the_api_is_open(server: RunningServer) -> None:
    processes = family(server)
    assert any(
        "workers" in " ".join(process.cmdline()) or "spawn" in " ".join(process.cmdline()) for process in processes[1:]
    )
    assert doors(processes) == {("tcp", "127.0.0.1", port_of(server))}


@pytest.mark.slow
def test_ranks_meet_on_loopback_only(tmp_path: Path, tiny_folder: Path) -> None:
    arguments = ["--base-model", f"{MODEL}={tiny_folder}", "--engine", "fsdp", "--ranks", "2", "--threads", "1"]
    with serve(tmp_path / "data", arguments) as running:
        processes = family(running)
        assert len(processes) > 2
        open_to_others = {door for door in doors(processes) if not door[1].startswith(("127.", "::1", "::ffff:127."))}
        assert open_to_others == set()
        assert ("tcp", "127.0.0.1", port_of(running)) in doors(processes)
