"""How much each base model computes, how well its time is used, and what waits."""

from __future__ import annotations

from fastapi import APIRouter

from app.dependencies import ServicesDep
from schemas.base_model_info import MemoryEstimate
from schemas.responses import MemoryNeeds, ModelThroughput, ThroughputResponse, WorkWaiting
from workers.runtime_protocol import Runtime

router = APIRouter(tags=["server"])

_PASS_TOKENS = 1024
_RANK = 32


@router.get("/throughput", operation_id="get_throughput")
async def get_throughput(services: ServicesDep) -> ThroughputResponse:
    """Totals of training since the server started and the rate of the last minute, per base model.

    The numbers are those of all projects together; nothing in them tells projects apart.
    """
    return ThroughputResponse(models=[_shown(name, one) for name, one in services.models.runtimes.items()])


def _shown(name: str, runtime: Runtime) -> ModelThroughput:
    done, load, info = runtime.throughput(), runtime.load(), runtime.info
    return ModelThroughput(
        model_name=name,
        state=runtime.state,
        tokens_per_second=done.tokens_per_second,
        tokens=done.tokens,
        rows=done.rows,
        padding_waste=max(0.0, 1 - done.tokens / done.rows) if done.rows else 0.0,
        sequences=done.sequences,
        passes=done.passes,
        turns=done.turns,
        steps=done.steps,
        turn_tokens=None if info is None else info.micro_batch_tokens,
        turn_fill=done.turn_fill,
        wall_seconds=done.wall_seconds,
        busy_seconds=done.busy_seconds,
        seconds=dict(done.seconds),
        flops=done.flops,
        peak_flops=None if info is None else info.peak_flops or None,
        mfu=done.mfu,
        waiting=WorkWaiting(training=load.training, samples=load.samples, adapters=load.adapters),
        memory=None if info is None else _needs(info.memory),
    )


def _needs(memory: MemoryEstimate) -> MemoryNeeds | None:
    if not memory.total:
        return None
    return MemoryNeeds(
        base=memory.base,
        adapter=memory.adapter(_RANK),
        training_pass=memory.training_pass([_PASS_TOKENS]),
        training_pass_checkpointed=memory.training_pass([_PASS_TOKENS], checkpointing=True),
        total=memory.total,
        free=memory.free,
    )
