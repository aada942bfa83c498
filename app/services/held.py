"""Accepted operations that a limit holds back: they are in the log, and no runtime has them yet.

They leave in order: those of a training run by their numbers, samples of one key as they came. So a runtime never waits
for an operation that is held here, and nobody else's work waits behind them. Not responsible for what is charged
(`limit_charges.py`), which is durable: after a restart the same operations are held for the rest of their time.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from app.services.limit_charges import take_slot
from app.services.tenant_limits import TenantLimits
from schemas.errors import TinsmithError
from store.database import Store
from store.records import OperationRecord

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Pause between two looks at limits that were changed, and at places that other servers have freed."""
LAST = math.inf
"""The place of an operation that comes after all others of its run."""


@dataclass(eq=False, slots=True)
class _Held:
    """`key`: (place in its line, when it came). `until`: seconds of the epoch; `slot`: it needs a place first."""

    key: tuple[float, int]
    record: OperationRecord
    go: Callable[[], None]
    until: float
    why: dict[str, Any] | None
    slot: bool
    full: Mapping[str, Any] | None
    over: bool = False

    def __lt__(self, other: _Held) -> bool:
        return self.key < other.key


@dataclass(eq=False, slots=True)
class _Line:
    """Operations that leave one after the other."""

    waiting: list[_Held] = field(default_factory=list)

    def head(self) -> _Held | None:
        while self.waiting and self.waiting[0].over:
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


class HeldBack:
    """Holds operations of this server back and lets them go. All methods are called from one event loop."""

    def __init__(self, store: Store, limits: TenantLimits, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._held: dict[str, _Held] = {}
        """By request id."""
        self._samples: Counter[tuple[str, str]] = Counter()
        """Samples held back, by base model and project."""
        self._numbers = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def take(
        self,
        record: OperationRecord,
        runtime: str,
        model_id: str | None,
        place: float | None,
        go: Callable[[], None],
    ) -> bool:
        """Hold an operation back if it has to wait, or one before it in its run does; False = it may go now.

        Args:
            runtime: the name of its base model.
            model_id: its training run; None for samples.
            place: in the order of its run; see `LAST`.
            go: hands it to its runtime; called once, unless the server stops before.
        """
        limited = record.limited or {}
        until, slot = float(limited.get("until", 0.0)), bool(limited.get("held"))
        key_id = _key_of(record)
        name = f"run {model_id}" if model_id is not None else f"samples {runtime} {record.project_id} {key_id or ''}"
        line = self._lines.get(name)
        place = 0.0 if model_id is None or place is None else place
        head = None if line is None else line.head()
        waits = slot or until > self._now()
        if not waits and (head is None or model_id is None or place < head.key[0]):
            return False
        self._numbers += 1
        held = _Held((place, self._numbers), record, go, until, limited.get("why"), slot, limited.get("full"))
        heapq.heappush(self._lines.setdefault(name, _Line()).waiting, held)
        self._held[record.request_id] = held
        if model_id is None:
            self._samples[runtime, record.project_id] += 1
            held.go = partial(self._go_sample, (runtime, record.project_id), go)
        self._wake.set()
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="held operations")
        return True

    def samples(self, project_id: str, runtime: str) -> int:
        """How many samples of a project are held back from a base model."""
        return self._samples[runtime, project_id]

    def has(self, request_id: str) -> bool:
        """Whether an operation is held back here."""
        return request_id in self._held

    def let_go(self, request_id: str) -> None:
        """Hand an operation to its runtime now: it is to be cancelled there, or its run is over."""
        held = self._held.get(request_id)
        if held is not None:
            self._leave(held)

    def let_go_of_run(self, model_id: str) -> None:
        """Hand what is held of a run that is over to its runtime, which fails it."""
        line = self._lines.pop(f"run {model_id}", None)
        while line is not None and (head := line.head()) is not None:
            self._leave(head)

    def freed(self) -> None:
        """An operation has ended: there may be a place."""
        if self._held:
            self._wake.set()

    def reason(self, request_id: str) -> str | None:
        """Why an operation is held back, for people; None if it is not."""
        held = self._held.get(request_id)
        if held is None:
            return None
        left = held.until - self._now()
        if left > 0 and held.why is not None:
            return f"limit {held.why['words']}; about {_seconds(left)} more"
        if held.slot and held.full is not None:
            return f"limit {held.full['words']}; this one runs when others have ended"
        return "waiting for an operation before it that a limit holds back"

    async def close(self) -> None:
        """Hold nothing back any more; what is held stays in the log."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _now(self) -> float:
        return self._clock().timestamp()

    def _go_sample(self, key: tuple[str, str], go: Callable[[], None]) -> None:
        self._samples[key] -= 1
        if not self._samples[key]:
            del self._samples[key]
        go()

    def _leave(self, held: _Held) -> None:
        if held.over:
            return
        held.over = True
        del self._held[held.record.request_id]
        held.go()

    async def _run(self) -> None:
        try:
            looked = 0.0
            while self._held:
                self._wake.clear()
                if abs(self._now() - looked) >= LOOK_SECONDS:
                    looked = self._now()
                    await self._look_at_limits()
                self._release()
                await self._take_slots()
                await self._rest(self._release())
        except Exception:
            logger.exception("held operations are let go when the next one comes, or at the next start")
        finally:
            self._task = None

    async def _rest(self, due: float) -> None:
        """Until there is news, or something may go, or limits are to be looked at again."""
        if not self._held:
            return
        try:
            async with asyncio.timeout(min(LOOK_SECONDS, max(0.0, due - self._now()))):
                await self._wake.wait()
        except TimeoutError:
            return

    def _release(self) -> float:
        """Let go what may go by now; returns when the next one may, as far as time alone decides."""
        due, now = math.inf, self._now()
        for name, line in list(self._lines.items()):
            while (head := line.head()) is not None and head.until <= now and not head.slot:
                self._leave(head)
            if head is None:
                self._lines.pop(name, None)
            elif head.until > now:
                due = min(due, head.until)
        return due

    async def _take_slots(self) -> None:
        """Ask for places for the first of each line, those that came first first."""
        while True:
            now = self._now()
            heads = [head for line in self._lines.values() if (head := line.head()) is not None]
            ready = sorted((head for head in heads if head.slot and head.until <= now), key=lambda head: head.key[1])
            taken = False
            full: set[frozenset[str]] = set()
            for head in ready:
                subjects = frozenset((head.record.limited or {}).get("subjects", ()))
                if subjects in full or head.over:
                    continue
                if await self._takes_slot(head):
                    taken = True
                else:
                    full.add(subjects)
            self._release()
            if not taken:
                return

    async def _takes_slot(self, head: _Held) -> bool:
        try:
            effective = await self._limits.effective(head.record.project_id, _key_of(head.record))
            answer = await self._store.write(lambda db: take_slot(db, effective, head.record.request_id))
        except TinsmithError as error:
            logger.warning("a held operation is looked at later: %s", error.message)
            return False
        if answer != "full":  # one that is gone fails at its end, without effect: another server settled it
            head.slot = False
        return answer != "full"

    async def _look_at_limits(self) -> None:
        """What was promised under a limit that has changed since comes as much sooner, or later."""
        now = self._now()
        for held in list(self._held.values()):
            if held.why is None or held.until <= now:
                continue
            try:
                effective = await self._limits.effective(held.record.project_id, _key_of(held.record))
            except TinsmithError as error:
                logger.warning("limits are looked at later: %s", error.message)
                return
            scopes = () if effective is None else effective.scopes
            scope = next((scope for scope in scopes if scope.subject == held.why["subject"]), None)
            value = None if scope is None else scope.values.get(held.why["name"])
            if scope is None or value is None:
                held.until, held.why = 0.0, None
            elif value != held.why["value"]:
                held.until = now + (held.until - now) * held.why["value"] / value
                held.why = {**held.why, "value": value, "words": scope.words(held.why["name"])}


def _key_of(record: OperationRecord) -> str | None:
    """The key whose limits were charged for an operation; None if only its project's were."""
    limited = record.limited or {}
    subjects = [*limited.get("subjects", ()), (limited.get("why") or {}).get("subject", "")]
    return next((subject.removeprefix("key:") for subject in subjects if subject.startswith("key:")), None)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else "a second"
