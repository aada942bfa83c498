"""Inflight slots: which weights the inflight samplers of a training run use now.

A slot only moves forward, in the order of the saves. The checkpoint that it leaves behind expires at once, and is swept
when no pending sample reads it any more. Not responsible for the samplers (`store/samplers.py`).
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from store.checkpoints import set_checkpoint_expiry
from store.tables import InflightSlot


async def move_slot(db: AsyncSession, model_id: str, seq_id: int, checkpoint_id: str, now: datetime) -> None:
    """Let the slot of a run name `checkpoint_id`, saved by request `seq_id`, unless a later save was here first."""
    slot = await db.get(InflightSlot, model_id)
    if slot is None:
        db.add(InflightSlot(model_id=model_id, seq_id=seq_id, checkpoint_id=checkpoint_id))
    elif seq_id < slot.seq_id:
        await set_checkpoint_expiry(db, checkpoint_id, now)
    else:
        await set_checkpoint_expiry(db, slot.checkpoint_id, now)
        slot.seq_id, slot.checkpoint_id = seq_id, checkpoint_id
    await db.flush()


async def slot_checkpoint(db: AsyncSession, model_id: str) -> str | None:
    """The checkpoint id in a run's slot, None if it has no slot. The caller has checked whose run it is."""
    slot = await db.get(InflightSlot, model_id)
    return None if slot is None else slot.checkpoint_id
