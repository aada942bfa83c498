"""Where a process stands among the ranks that compute one base model together, and where they meet.

Plain data that crosses process borders. Not responsible for meeting (`engines/fsdp/group.py`). Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of several; the default is a process of its own.

    Args:
        rank, ranks: number of this process, and of all.
        address, port: where rank 0 listens for the others.
        listen_fd: a descriptor, inherited by rank 0, of a socket that listens there already; None = it binds the port.
        local_rank: which of the CUDA devices that this process sees is its own.
        local_ranks: how many of the ranks share the memory of this machine.
        timeout: seconds that a rank waits for the others in a collective before it counts them as lost.
    """

    rank: int = 0
    ranks: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None
    local_rank: int = 0
    local_ranks: int = 1
    timeout: float = 120.0
