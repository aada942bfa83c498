"""A runtime in another process: a server that has the real one, and edges that use it over any link."""

from workers.remote.edge import RemoteRuntime
from workers.remote.link import Link, LinkBroken
from workers.remote.server import RuntimeServer

__all__ = ["Link", "LinkBroken", "RemoteRuntime", "RuntimeServer"]
