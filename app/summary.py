"""One line a minute on what a server has done, if it has done anything.

Not responsible for counting (`app/metrics/events.py`).
"""

from __future__ import annotations

import asyncio
import logging

from app.metrics.events import Events, Totals

logger = logging.getLogger(__name__)

SECONDS = 60.0


async def summarize(events: Events, seconds: float = SECONDS) -> None:
    """Log what was done in every `seconds`, until it is cancelled; nothing for a time without operations."""
    before = events.totals()
    while True:
        await asyncio.sleep(seconds)
        now = events.totals()
        line = summary(before, now)
        if line is not None:
            logger.info("in the last %g s: %s", seconds, line)
        before = now


def summary(before: Totals, now: Totals) -> str | None:
    """What was done between two looks, in words; None if no operation ended."""
    done = {kind: count - before.finished.get(kind, 0) for kind, count in now.finished.items()}
    words = [f"{count:,} {kind}" for kind, count in sorted(done.items(), key=lambda item: -item[1]) if count]
    failed = now.failed - before.failed
    if failed:
        words.append(f"{failed:,} failed")
    return f"{', '.join(words)}; {now.requests - before.requests:,} requests" if words else None
