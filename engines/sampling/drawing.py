"""One token for every row that has logits, and what is reported about it.

Not responsible for logits or for endings (`requests.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.lockstep import Alone, Lockstep
from engines.sampling.requests import Row, Running
from engines.sampling.sampling_rules import LogprobKind, draw, tempered_logprobs
from schemas.errors import EngineFailure, TinsmithError


def draw_tokens(
    runnings: Sequence[Running], kind: LogprobKind, lockstep: Lockstep | None = None
) -> dict[str, TinsmithError]:
    """Draw one token for every living row of these requests (all have logits), and use the logits up.

    With `lockstep`, the tokens are those of rank 0 on every rank. Returns the requests whose logits are not numbers,
    with their errors; nothing is drawn for them.
    """
    failed = _broken(runnings)
    rows = [(row, running) for running in runnings if running.request_id not in failed for row in running.alive]
    logits = [running.logits for running in runnings if running.request_id not in failed and running.logits is not None]
    for running in runnings:
        running.logits = None
    if rows:
        _draw(rows, torch.cat(logits), kind, lockstep or Alone())
    return failed


def _broken(runnings: Sequence[Running]) -> dict[str, TinsmithError]:
    failed: dict[str, TinsmithError] = {}
    for running in runnings:
        assert running.logits is not None
        # An infinite maximum has no distribution either; single tokens may well be impossible (-inf).
        if not bool(running.logits.amax(-1).isfinite().all()):
            failed[running.request_id] = EngineFailure(
                "the model's logits are not finite with this adapter", hint="its weights are broken"
            )
    return failed


def _draw(rows: Sequence[tuple[Row, Running]], logits: Tensor, kind: LogprobKind, lockstep: Lockstep) -> None:
    """`logits` [rows, V] of these rows, in order."""
    rules = [running.rule for _, running in rows]
    logprobs = tempered_logprobs(logits, [rule.temperature for rule in rules])
    asked = [running.plan.request.plain_logprobs for _, running in rows]
    plain = logprobs
    if (kind == "plain" or any(asked)) and any(rule.temperature not in (0.0, 1.0) for rule in rules):
        plain = tempered_logprobs(logits, [1.0] * len(rules))
    reported = plain if kind == "plain" else logprobs
    tokens = lockstep.first(draw(logprobs, rules, [row.draws.random() for row, _ in rows]))
    chosen = torch.tensor(tokens, device=reported.device)[:, None]
    values = reported.gather(-1, chosen)[:, 0].tolist()
    if any(asked):
        for (row, _), wanted, value in zip(rows, asked, plain.gather(-1, chosen)[:, 0].tolist(), strict=True):
            if wanted:
                row.plain.append(value)
    _add_topk(rows, reported)
    for (row, _), token, value in zip(rows, tokens, values, strict=True):
        row.take(token, value)


def _add_topk(rows: Sequence[tuple[Row, Running]], reported: Tensor) -> None:
    wide = max(running.plan.request.topk_sample_logprobs for _, running in rows)
    if not wide:
        return
    best, ids = (tensor.tolist() for tensor in torch.topk(reported, wide, dim=-1))
    for place, (row, running) in enumerate(rows):
        k = running.plan.request.topk_sample_logprobs
        if k:
            row.topk.append((ids[place][:k], best[place][:k]))
