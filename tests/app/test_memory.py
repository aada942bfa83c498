"""Large buffers that are freed go back to the system, from whichever thread they were."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from app import memory

PROGRAM = """
import os, sys, threading
from app import memory
if sys.argv[1] == "bound":
    assert memory.bound({})
together = threading.Barrier(8)

def use():
    together.wait()
    del (first := bytearray(30 << 20))[:]
    del first
    second = bytearray(20 << 20)
    together.wait()
    del second
    together.wait()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

before = resident()
threads = [threading.Thread(target=use) for _ in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
print(resident() - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is another library's")


def _kept(how: str) -> int:
    """MiB that a process keeps after eight threads have freed 20 MiB each."""
    clean = {"PATH": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, env=clean)
    return int(done.stdout)


def test_what_threads_have_freed_goes_back_to_the_system() -> None:
    assert _kept("as it is") > 60, "the allocator would keep it"
    assert _kept("bound") < 15


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_the_environment_has_the_last_word(name: str) -> None:
    assert not memory.bound({name: "glibc.malloc.arena_max=4"})
