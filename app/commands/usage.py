"""`tinsmith usage`: what the project used."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Url, connect
from app.commands.output import print_json, print_table, size_text

app = typer.Typer(add_completion=False)

_KINDS = ("training", "sampling_prefill", "sampling_sample", "checkpoint", "storage")
_QUANTITIES = ("token_count", "count", "gigabyte_hours")
MOST_DAYS = 14


@app.command()
def usage(
    *,
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="How many days, today included.")] = 7,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """What the project used by the UTC day and base model: tokens, checkpoints, gigabyte-hours of storage."""
    server = connect(url, api_key, data_dir)
    window = window_of(days, datetime.now(UTC))
    events = server.get("billing/usage/events", **window)["data"]
    stored = server.get("billing/usage/checkpoints/current")["data"]
    rows = _by_day(events)
    if as_json:
        print_json("usage", {**window, "days": rows, "stored": stored})
        return
    columns = ("day", "base model", "trained", "prefilled", "sampled", "checkpoints", "GB-hours")
    shown = [(row["day"], row["base_model"], *(round(row[kind], 3) or None for kind in _KINDS)) for row in rows]
    nothing = f"nothing was used in the last {days} days: training, sampling and checkpoints are counted"
    print_table(columns, shown, right=columns[2:], empty=nothing)
    if shown:
        typer.echo()
    for each in stored or [{"checkpoint_count": 0, "size_bytes": 0}]:
        typer.echo(f"stored now: {each['checkpoint_count']} checkpoints, {size_text(each['size_bytes'])}")


def window_of(days: int, now: datetime) -> dict[str, str]:
    """From the beginning of the first day to the end of the hour, at most `MOST_DAYS`; `now` is in UTC."""
    hour = now.replace(minute=0, second=0, microsecond=0)
    end = hour + timedelta(hours=1)  # after 23:00 this is tomorrow: days are counted from `now`
    start = max(hour.replace(hour=0) - timedelta(days=days - 1), end - timedelta(days=MOST_DAYS))
    return {"starting_on": start.isoformat(), "ending_before": end.isoformat()}


def _by_day(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    totals: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: dict.fromkeys(_KINDS, 0))
    for event in events:
        info = event["event_info"]
        kind = info["type"]
        quantity = next((info[name] for name in _QUANTITIES if name in info), 0)
        if kind in _KINDS:
            totals[event["bucket_start"][:10], event["base_model"]][kind] += quantity
    return [{"day": day, "base_model": model, **kinds} for (day, model), kinds in sorted(totals.items())]
