"""The passes of several ranks side by side: each computes its own datums, all enter the same collectives.

How many passes there are, and which of them go back through the body, follows from the batches alone, which every rank
has whole; a rank without work of its own joins with an idle pass. What a pass brought is exchanged once per turn, and a
gradient is added up once per operation. Not responsible for who computes what (`shares.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engines.fsdp.group import Ranks
from engines.torch_engine.open_operations import Ended, OpenOperations, Work
from engines.torch_engine.operations import DatumLoss, OpenOperation
from schemas.errors import TinsmithError
from schemas.fail_points import fail_point

_FLAGS = 2
"""Per datum, behind the logprobs: whether it failed, and whether its gradient was not finite."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What this rank knows of one datum of its own."""

    outcome: Tensor | TinsmithError
    loss: DatumLoss


@dataclass(eq=False, slots=True)
class SharedTurns(OpenOperations):
    """Open operations whose datums are computed by the ranks that `OpenOperation.share` names."""

    ranks: Ranks = field(default_factory=lambda: Ranks(0, 1))

    def execute(self, works: Iterable[Work], ended: Ended) -> None:
        """See `OpenOperations.execute`. With several ranks, an unexpected failure ends the process: the others wait."""
        if self.ranks.size == 1:
            OpenOperations.execute(self, works, ended)
            return
        works = list(works)
        try:
            found: dict[Work, _Found] = {}
            for backward in (False, True):
                found |= self._compute([work for work in works if work.operation.batch.backward is backward], backward)
            self._settle(works, found, ended)
        except Exception as error:
            self.ranks.broken(error)

    def run_pass(
        self, works: Sequence[Work], *, body: bool | None = None
    ) -> list[tuple[Tensor | TinsmithError, DatumLoss]]:
        """See `OpenOperations.run_pass`; after a failure the sharded model is ready for the next pass."""
        try:
            return OpenOperations.run_pass(self, works, body=body)
        except Exception:
            for root in (self.run.model, self.run.model.base_model):
                if hasattr(root, "reset_iter_state"):  # a library may leave a model on one rank as it is
                    root.reset_iter_state()
                    break
            raise

    def commit(self, operation: OpenOperation) -> None:
        """See `OpenOperations.commit`: what the ranks have collected is added up first."""
        if operation.batch.backward:
            gradient = operation.collect()
            assert operation.flat is not None
            if not self.ranks.leads:  # the head, which is whole on every rank, counts once for a copy of the model
                for part in gradient.get(str(self.run.head.linear.name), ()):
                    part.zero_()
            fail_point("gradient.reduce")
            self.ranks.add_up(operation.flat)
        OpenOperations.commit(self, operation)

    def _compute(self, works: Sequence[Work], backward: bool) -> dict[Work, _Found]:
        """The datums of this rank, in as many passes as the busiest rank needs."""
        passes = [
            list(self.passes([work for work in works if work.operation.share[work.index] == replica]))
            for replica in range(self.ranks.replicas)
        ]
        found: dict[Work, _Found] = {}
        for number in range(max(map(len, passes))):
            beside = [own[number] if number < len(own) else [] for own in passes]
            body = backward and any(self.run.has_body(w.operation.state.weights) for part in beside for w in part)
            own = beside[self.ranks.replica]
            if own:
                outcomes = self.run_pass(own, body=body)
                found |= {work: _Found(*outcome) for work, outcome in zip(own, outcomes, strict=True)}
            else:
                self.run.idle(body)
        if not self.ranks.leads:  # the same numbers, which are to be counted once; failures may be this rank's own
            found = {work: replace(each, outcome=_silent(each.outcome)) for work, each in found.items()}
        return found

    def _settle(self, works: Sequence[Work], found: dict[Work, _Found], ended: Ended) -> None:
        """Exchange what was found, and give it to the operations: the same on every rank."""
        if not works:
            return
        targets = [work.operation.batch.datums[work.index].inputs["target_tokens"] for work in works]
        vector = torch.zeros(sum(t.size for t in targets) + _FLAGS * len(works), device=self.run.device)
        *parts, flags = torch.split(vector, [t.size for t in targets] + [_FLAGS * len(works)])
        flags = flags.view(len(works), _FLAGS)
        errors: dict[int, TinsmithError] = {}
        for place, (work, part) in enumerate(zip(works, parts, strict=True)):
            own = found.get(work)
            if own is None:
                continue
            flags[place, 1] = float(not own.loss.finite)
            if isinstance(own.outcome, Tensor):
                part.copy_(own.outcome.reshape(-1))
            else:
                errors[place] = own.outcome
                flags[place, 0] = 1.0
        self.ranks.add_up(vector)
        failed, infinite = flags.bool().t().tolist()
        if any(failed):
            errors = {place: error for found_there in self.ranks.gather(errors) for place, error in found_there.items()}
        for place, (work, part) in enumerate(zip(works, parts, strict=True)):
            loss = work.operation.loss(work.index, self.run.device)
            loss.finite = not infinite[place]
            outcome = errors.get(place)
            self.take(work, part.view(targets[place].shape) if outcome is None else outcome, loss, ended)
        self._agree(list(dict.fromkeys(work.operation_id for work in works)), ended)

    def _agree(self, operation_ids: Sequence[str], ended: Ended) -> None:
        """An operation that has failed on one rank (a custom loss out of its time, say) has failed on all."""
        if min(self.ranks.least([-float(name in ended) for name in operation_ids])) == 0:
            return
        found = self.ranks.gather({name: ended[name] for name in operation_ids if name in ended})
        for errors in reversed(found):
            ended.update(errors)


def _silent(outcome: Tensor | TinsmithError) -> Tensor | TinsmithError:
    return torch.zeros_like(outcome) if isinstance(outcome, Tensor) else outcome
