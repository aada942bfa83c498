"""The actors of a worker group between one start and their end. Everything here blocks, and runs in one thread.

Not responsible for waiting for answers, nor for what a death means (`workers/ray/group.py`).
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engines.environments import engine_interpreter
from engines.ranks import Place
from schemas.errors import TinsmithError, Unavailable, WorkerDied
from workers.interpreter import ready_interpreter
from workers.messages import PICKLE_PROTOCOL, Call
from workers.ray.placement import Bundle, node_environment, rank_bundle, shortage
from workers.ray.rank_actor import RankActor, Site
from workers.spec import WorkerSpec

_log = logging.getLogger("tinsmith.workers")

_CONTROL, _LIFE = "control", "life"
_RankActor = ray.remote(concurrency_groups={_CONTROL: 2, _LIFE: 1})(RankActor)
"""Whatever names no group runs in the default one, which has one thread and keeps the order of the calls."""


def _ask(spec: WorkerSpec) -> str | TinsmithError:
    """On a node: its interpreter for the ranks, or why there is none."""
    try:
        return ready_interpreter(spec, ray=ray.__version__)
    except TinsmithError as error:
        return error


_Ask = ray.remote(max_retries=0)(_ask)


_LOOK_SECONDS = 0.25
"""How often waiting for a place looks whether it is still wanted."""


_INLINE_BYTES = 100_000
"""Ray sends arguments of up to this size along with the call: for them the way over the object store is longer."""


@dataclass(frozen=True, slots=True)
class GangOptions:
    """How the ranks are placed.

    Args:
        bundle: what one rank takes of the cluster; None = what the spec says (`rank_bundle`).
        place_timeout: seconds until a cluster without room counts as too small.
        python: an interpreter on the nodes for the ranks; None = what the spec says (`ready_interpreter`).
    """

    bundle: Bundle | None = None
    place_timeout: float = 60.0
    python: str | None = None


class Gang:
    """One actor for each rank of `spec`, each in its bundle of one placement group."""

    def __init__(self, spec: WorkerSpec, options: GangOptions) -> None:
        self._spec = spec
        self._options = options
        self._unwanted = threading.Event()
        self._group: Any = None
        self._actors: list[Any] = []

    # -- coming up -------------------------------------------------------------------------------------------------
    def create(self) -> None:
        """Find a place for all ranks and create their actors there. Raises `Unavailable` if there is none in time."""
        if not ray.is_initialized():
            raise Unavailable("this process is not connected to a Ray cluster")
        bundle = dict(self._options.bundle or rank_bundle(self._spec, ray.cluster_resources()))
        self._group = placement_group([bundle] * self._spec.ranks, strategy="PACK")
        deadline = time.monotonic() + self._options.place_timeout
        while not self._group.wait(_LOOK_SECONDS):
            if self._unwanted.is_set():
                raise WorkerDied("the worker was stopped")
            if time.monotonic() > deadline:
                raise Unavailable(shortage(self._spec.model, self._spec.ranks, bundle, self._options.place_timeout))
        python = self._options.python or self._interpreter(bundle)
        self._actors = [self._create_actor(rank, bundle, python) for rank in range(self._spec.ranks)]

    def _interpreter(self, bundle: Bundle) -> str | None:
        """What runs the ranks, after every node that has a place for one has been asked whether it can; None = what
        runs everything on the cluster. Raises `Unavailable`: Ray's own words for a missing interpreter are no help."""
        if engine_interpreter(self._spec.engine, self._spec.engine_python) is None:
            return None
        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        first = {node: index for index, node in sorted(nodes.items(), reverse=True)}
        asked = [
            _Ask.options(
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                runtime_env={"env_vars": node_environment(self._spec, bundle)},
            ).remote(self._spec)
            for index in first.values()
        ]
        answers: list[str | TinsmithError] = ray.get(asked)
        for answer in answers:
            if isinstance(answer, TinsmithError):
                raise answer
        return str(answers[0])

    def _create_actor(self, rank: int, bundle: Bundle, python: str | None) -> Any:
        runtime_env: dict[str, Any] = {"env_vars": node_environment(self._spec, bundle)}
        if python is not None:
            runtime_env["py_executable"] = python
        others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        return _RankActor.options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            resources=others,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            runtime_env=runtime_env,
        ).remote(rank)

    def sites(self) -> list[Future[Site]]:
        """Where each rank runs; ready when its process is there."""
        return [actor.site.remote().future() for actor in self._actors]

    def load(self, sites: Sequence[Site]) -> list[Future[Any]]:
        """Let every rank build its worker; they meet at rank 0's site."""
        places = [_place(sites, rank, self._spec.rank_timeout) for rank in range(len(sites))]
        spec = replace(self._spec, threads=self._spec.threads or 1)
        return [
            actor.load.remote(replace(spec, place=place) if len(places) > 1 else spec, _meeting(place)).future()
            for actor, place in zip(self._actors, places, strict=True)
        ]

    def lives(self) -> list[Future[None]]:
        """One for each rank, which fails when its process ends."""
        return [actor.live.options(concurrency_group=_LIFE).remote().future() for actor in self._actors]

    # -- while they run --------------------------------------------------------------------------------------------
    def send(self, calls: Sequence[Call]) -> list[Future[Any]]:
        """Make a call on every rank; a large one that several of them get goes into the object store once."""
        first = calls[0]
        sent: Sequence[Any] = calls
        if len(calls) > 1 and all(call is first for call in calls) and _size(first) > _INLINE_BYTES:
            sent = [ray.put(first)] * len(calls)
        return [actor.call.remote(call).future() for actor, call in zip(self._actors, sent, strict=True)]

    def ping(self) -> list[Future[None]]:
        """Ask every rank whether it runs; it answers beside its work."""
        return [actor.ping.options(concurrency_group=_CONTROL).remote().future() for actor in self._actors]

    def progress(self) -> Future[str | None]:
        """What rank 0 is loading."""
        future: Future[str | None] = self._actors[0].progress.options(concurrency_group=_CONTROL).remote().future()
        return future

    # -- the end ---------------------------------------------------------------------------------------------------
    def give_up(self) -> None:
        """From any thread: nobody waits for a place any more."""
        self._unwanted.set()

    def kill(self) -> None:
        """End all ranks at once. Ray ends a process that does not react by SIGKILL after five seconds."""
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)

    def end(self, grace: float) -> None:
        """Let running calls finish for `grace` seconds, then end all ranks and give their places back."""
        if not ray.is_initialized():
            return
        try:
            if grace:
                ray.get([actor.finished.remote() for actor in self._actors], timeout=grace)
        except GetTimeoutError:
            _log.warning("ranks of base model %s did not finish within %g s", self._spec.model, grace)
        except RayError as error:
            _log.info("ranks of base model %s had ended: %s", self._spec.model, type(error).__name__)
        self.kill()
        if self._group is not None:
            remove_placement_group(self._group)


def _size(call: Call) -> int:
    """Bytes of a call, without a copy of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(call, PICKLE_PROTOCOL, buffer_callback=buffers.append)
    return len(data) + sum(buffer.raw().nbytes for buffer in buffers)


def _place(sites: Sequence[Site], rank: int, timeout: float) -> Place:
    """Where a rank stands. Each sees only its own GPU: that is device 0 for it."""
    address = sites[0].address
    near = sum(site.address == sites[rank].address for site in sites)
    return Place(rank, len(sites), address, sites[0].port, local_rank=0, local_ranks=near, timeout=timeout)


def _meeting(place: Place) -> dict[str, str]:
    """What `torch.distributed` finds the other ranks by, for workers that read it from their environment."""
    return {
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_RANK": str(place.local_rank),
    }
