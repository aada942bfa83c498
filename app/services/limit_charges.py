"""What an operation is charged when it is accepted: out of token buckets, places and budgets, in that transaction.

A bucket may be charged more than is in it. The operation is then accepted, and held back until as much has flowed in:
its place in the queue is durable, and later operations come after it. Not responsible for which limits apply
(`tenant_limits.py`) or for the waiting itself (`held.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.tenant_limits import Cost, Effective, Scope
from schemas.errors import OverLimit, RateLimited
from schemas.limits import LimitName
from store import runs, usage
from store.limit_counters import Counters, counters_of, keep, limited_of, note_limited, others_wait
from store.records import OperationRecord

MOST_HELD_SECONDS = 3600.0
"""An operation that would be held back for longer is not taken yet: its client is asked to come again."""
LONGEST_RETRY = 60.0
"""What the SDK accepts as time to wait before a repeat."""
_SOON = 0.005
"""Seconds for which nothing is held back."""
FIRST_GUESS = 256.0
"""Tokens that a sequence is thought to draw before any has ended, as in `workers/sample_line.py`."""


@dataclass(slots=True)
class _Charge:
    """What comes together over the scopes. `wait`: seconds until all buckets have what was taken; `why`: for whom."""

    shares: dict[str, dict[str, Any]] = field(default_factory=dict)
    wait: float = 0.0
    why: tuple[Scope, LimitName] | None = None
    full: list[Scope] = field(default_factory=list)

    def share(self, scope: Scope) -> dict[str, Any]:
        return self.shares.setdefault(scope.subject, {})


async def charge(
    db: AsyncSession,
    effective: Effective,
    record: OperationRecord,
    cost: Cost,
    *,
    ordered: bool,
    creates: bool,
    now: float,
    patience: float = MOST_HELD_SECONDS,
) -> Mapping[str, Any] | None:
    """Charge a new operation, within the transaction that accepts it.

    An operation that others of its run wait for is never held back, for they could not run before it; what it is
    charged counts for those after it.

    Args:
        ordered: whether it has a place in the order of a training run.
        creates: whether it makes a training run, whose row is there already.
        now: seconds of the epoch.
        patience: seconds for which it may be held back.

    Returns:
        What `Operation.limited` has to hold; None = nothing.

    Raises:
        OverLimit: it will not be taken unless it, or a limit, is changed.
        RateLimited: there is no room for it yet, nor within `patience`.
    """
    found = _Charge()
    locked: list[tuple[Scope, Counters]] = []
    named = _named(cost, creates)
    for scope in effective.scopes:
        if named.isdisjoint(scope.values):
            continue
        counters = await counters_of(db, scope.subject)
        locked.append((scope, counters))
        await _check_stock(db, effective, scope, cost, creates)
        _charge_buckets(found, scope, counters, cost, now)
        _charge_budgets(found, scope, counters, cost)
        limit = scope.values.get("unfinished_operations")
        if limit is not None:
            found.share(scope)["slot"] = 1
            if counters.held > 0 or counters.operations >= limit:
                found.full.append(scope)
    late = found.wait > _SOON or bool(found.full)
    if late and ordered and record.seq_id is not None and await others_wait(db, record.scope, record.seq_id):
        late = False
    if late and found.wait > patience:
        raise _not_yet(found, patience)
    held = late and bool(found.full)
    for scope, counters in locked:
        if "slot" in found.share(scope):
            counters.held += held
            counters.operations += not held
        await keep(db, counters)
    return await _noted(db, record, found, late=late, held=held, now=now)


def _named(cost: Cost, creates: bool) -> frozenset[LimitName]:
    """The limits that are counted for an operation."""
    names: set[LimitName] = {"requests_per_second", "unfinished_operations"}
    if cost.training:
        names |= {"training_tokens_per_second", "training_token_budget"}
    if cost.sequences:
        names |= {"sampling_tokens_per_second", "sampling_token_budget"}
    if creates:
        names.add("live_runs")
    if cost.stores:
        names.add("checkpoint_bytes")
    return frozenset(names)


async def _noted(
    db: AsyncSession, record: OperationRecord, found: _Charge, *, late: bool, held: bool, now: float
) -> Mapping[str, Any] | None:
    shares = {subject: share for subject, share in found.shares.items() if share}
    if not shares and not late:
        return None
    limited: dict[str, Any] = {"subjects": shares}
    if late and found.wait > _SOON and found.why is not None:
        limited["until"], limited["why"] = now + found.wait, _why(*found.why)
    if held:
        limited["held"], limited["full"] = True, _why(found.full[0], "unfinished_operations")
    await note_limited(db, record.request_id, limited)
    return limited


def _why(scope: Scope, name: LimitName) -> dict[str, Any]:
    return {"subject": scope.subject, "name": name, "value": scope.values[name], "words": scope.words(name)}


async def _check_stock(db: AsyncSession, effective: Effective, scope: Scope, cost: Cost, creates: bool) -> None:
    """Raise `OverLimit` for a training run or checkpoint too many. The subject's counters are held: what is counted
    here stays true until the commit."""
    keys = effective.counted(scope)
    most = scope.values.get("live_runs")
    if creates and most is not None:
        live = await runs.count_live(db, effective.project_id, keys)
        if live > most:
            raise OverLimit(
                f"as many training runs as may be ({live - 1}) are live already: limit {scope.words('live_runs')}",
                hint="finish a session, or unload a model, that is not needed any more",
            )
    most = scope.values.get("checkpoint_bytes")
    if cost.stores and most is not None:
        stored = await usage.stored_bytes(db, effective.project_id, keys)
        if stored >= most:
            raise storage_full(scope, stored)


def storage_full(scope: Scope, stored: int) -> OverLimit:
    """The error of a checkpoint for which there is no room; `stored`: bytes that are stored, or would be."""
    return OverLimit(
        f"checkpoints of {stored:,} bytes would be stored, or are, and limit {scope.words('checkpoint_bytes')}",
        hint="delete checkpoints, or let them expire, then save again",
        code="storage_full",
    )


async def check_storage(db: AsyncSession, effective: Effective) -> None:
    """Raise `OverLimit` if a checkpoint whose row has just been written is too large for what is left."""
    for scope in effective.scopes:
        most = scope.values.get("checkpoint_bytes")
        if most is None:
            continue
        await keep(db, await counters_of(db, scope.subject))  # so that no other server writes one beside it
        keys = effective.counted(scope)
        stored = await usage.stored_bytes(db, effective.project_id, keys)
        if stored > most:
            raise storage_full(scope, stored)


def _charge_buckets(found: _Charge, scope: Scope, counters: Counters, cost: Cost, now: float) -> None:
    waits: list[tuple[float, LimitName]] = []
    if (rate := scope.rate("requests_per_second", "requests_burst")) is not None:
        waits.append((counters.take("requests", 1, now, *rate), "requests_per_second"))
    rate = scope.rate("training_tokens_per_second", "training_tokens_burst")
    if rate is not None and cost.training:
        waits.append((counters.take("training", cost.training, now, *rate), "training_tokens_per_second"))
    rate = scope.rate("sampling_tokens_per_second", "sampling_tokens_burst")
    if rate is not None and cost.sequences:
        mean = FIRST_GUESS if counters.sequence_tokens is None else counters.sequence_tokens
        each = mean if cost.most is None else min(mean, cost.most)
        amount = cost.prompt + cost.sequences * each
        found.share(scope).update(charged=amount, sequences=cost.sequences)
        waits.append((counters.take("sampling", amount, now, *rate), "sampling_tokens_per_second"))
    for wait, name in waits:
        if wait > found.wait:
            found.wait, found.why = wait, (scope, name)


def _charge_budgets(found: _Charge, scope: Scope, counters: Counters, cost: Cost) -> None:
    """Reserve what an operation may use, which is the most it can: a budget is never passed."""
    budget = scope.values.get("training_token_budget")
    if budget is not None and cost.training:
        left = int(budget) - counters.training_used - counters.training_reserved
        if cost.training > left:
            raise _budget_spent(scope, "training_token_budget", counters, "training", cost.training, "data")
        counters.training_reserved += cost.training
        found.share(scope)["training"] = cost.training
    budget = scope.values.get("sampling_token_budget")
    if budget is not None and cost.sequences:
        if cost.most is None:
            raise RateLimited(
                f"limit {scope.words('sampling_token_budget')}, and how much this sample may draw is not known before "
                "its base model is loaded",
                field="sampling_params.max_tokens",
                hint="give max_tokens, or send it again later",
                retry_after=5.0,
            )
        needed = cost.prompt + cost.sequences * cost.most
        left = int(budget) - counters.sampling_used
        if needed > left:
            field = "sampling_params.max_tokens"
            raise _budget_spent(scope, "sampling_token_budget", counters, "sampling", needed, field)
        if needed > left - counters.sampling_reserved:
            raise RateLimited(
                f"this sample may use {needed} tokens; limit {scope.words('sampling_token_budget')}, of which "
                f"{counters.sampling_used} are used and unfinished samples may use {counters.sampling_reserved}",
                field="sampling_params.max_tokens",
                hint="it is taken as soon as those have used less; a smaller max_tokens reserves less",
                retry_after=5.0,
            )
        counters.sampling_reserved += needed
        found.share(scope)["sampling"] = needed


def _budget_spent(
    scope: Scope, name: LimitName, counters: Counters, kind: Literal["training", "sampling"], asked: int, field: str
) -> OverLimit:
    used: int = getattr(counters, f"{kind}_used")
    reserved: int = counters.training_reserved if kind == "training" else 0
    left = max(0, int(scope.values[name]) - used - reserved)
    promised = f", {reserved} are promised to unfinished requests" if reserved else ""
    may = "may use" if kind == "sampling" else "has"
    return OverLimit(
        f"this request {may} {asked} tokens, but limit {scope.words(name)}, of which {used} are used{promised}: "
        f"at most {left} are left",
        field=field,
        hint="ask for fewer tokens, or the operator for a larger budget",
        code="budget_spent",
    )


def _not_yet(found: _Charge, patience: float) -> RateLimited:
    assert found.why is not None  # what makes it wait
    scope, name = found.why
    return RateLimited(
        f"limit {scope.words(name)}; what was accepted before fills the next {found.wait:,.0f} seconds, and work is "
        f"held back for at most {patience:,.0f}",
        hint="send this again after Retry-After seconds",
        retry_after=min(LONGEST_RETRY, max(1.0, found.wait - patience)),
    )


SlotAnswer = Literal["taken", "full", "gone"]


async def take_slot(db: AsyncSession, effective: Effective | None, request_id: str) -> SlotAnswer:
    """Give a held operation its place among those that may run, if there is one in every scope that it needs.

    Returns "gone" if it is pending no more, or not held.
    """
    limited = await limited_of(db, request_id)
    if limited is None or not limited.get("held"):
        return "gone"
    scopes = {} if effective is None else {scope.subject: scope for scope in effective.scopes}
    subjects = sorted(subject for subject, share in limited["subjects"].items() if "slot" in share)
    locked = [await counters_of(db, subject) for subject in subjects]
    for counters in locked:
        scope = scopes.get(counters.subject)
        limit = None if scope is None else scope.values.get("unfinished_operations")
        if limit is not None and counters.operations >= limit:
            return "full"
    for counters in locked:
        counters.held -= 1
        counters.operations += 1
        await keep(db, counters)
    del limited["held"], limited["full"]
    await note_limited(db, request_id, limited)
    return "taken"
