"""`tinsmith status`: how a server is, in one look."""

from __future__ import annotations

from typing import Any

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Server, Url, connect
from app.commands.output import FAILED, plain, print_facts, print_json, print_table, time_text

app = typer.Typer(add_completion=False)

NO_RUNS = "no training runs yet: `tinsmith demo` makes one, docs/quickstart.md shows how to make your own"
RUNS = 10
"""How many of the newest runs are shown."""


@app.command()
def status(
    *, url: Url = DEFAULT_URL, api_key: ApiKey = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """How a server is: version, base models, what waits, your newest runs. Ends with 1 unless it is ready."""
    server = connect(url, api_key, data_dir)
    found = look(server)
    if as_json:
        print_json("status", found)
    else:
        _show(found)
    raise typer.Exit(0 if found["ready"] else FAILED)


def look(server: Server) -> dict[str, Any]:
    """What there is to know, from the routes that the server has. `queue` is None if it has none."""
    about = server.get("get_server_capabilities")
    loads = {each["model_name"]: each for each in server.get("throughput")["models"]}
    ready = server.readiness()
    runs = server.get("training_runs", limit=RUNS)
    queue = server.optional("queue")
    return {
        "url": server.url,
        "version": about.get("server_version"),
        "engine": about["engine"]["name"],
        "ready": ready["status"] == "ready",
        "models": [_model(each, loads) for each in ready["models"]],
        "queue": queue,
        "runs": runs["training_runs"],
        "runs_total": runs["cursor"]["total_count"],
    }


def _model(each: dict[str, Any], loads: dict[str, Any]) -> dict[str, Any]:
    load = loads.get(each["model_name"], {})
    waiting = load.get("waiting", {})
    return {
        "model_name": each["model_name"],
        "state": each["state"],
        "detail": each.get("detail"),
        "live_runs": waiting.get("adapters"),
        "training_waiting": waiting.get("training"),
        "samples_waiting": waiting.get("samples"),
        "tokens_per_second": load.get("tokens_per_second"),
    }


def _show(found: dict[str, Any]) -> None:
    print_facts(
        {
            "server": found["url"],
            "version": found["version"] or "older than this command",
            "engine": found["engine"],
            "state": "ready" if found["ready"] else "not ready",
        }
    )
    typer.echo()
    columns = ("base model", "state", "live runs", "training waits", "samples wait", "tokens/s")
    rows = [
        (
            each["model_name"],
            each["state"],
            each["live_runs"],
            each["training_waiting"],
            each["samples_waiting"],
            None if each["tokens_per_second"] is None else round(each["tokens_per_second"]),
        )
        for each in found["models"]
    ]
    print_table(columns, rows, right=columns[2:])
    for each in found["models"]:
        if each["detail"]:
            typer.echo(f"{plain(each['model_name'])}: {plain(each['detail'])}")
    typer.echo()
    _show_queue(found["queue"])
    typer.echo()
    if not found["runs"]:
        typer.echo(NO_RUNS)
        return
    typer.echo(f"newest of {found['runs_total']} training runs")
    print_table(
        ("run", "base model", "rank", "state", "last request"),
        [
            (each["training_run_id"], each["base_model"], each.get("lora_rank"), run_state(each), _time(each))
            for each in found["runs"]
        ],
        right=("rank",),
    )


def run_state(run: dict[str, Any]) -> str:
    """The state of a run; servers that do not tell it say at least whether its weights are lost."""
    return "lost" if run.get("corrupted") else str(run.get("state") or "-")


def _time(run: dict[str, Any]) -> str | None:
    return time_text(run.get("last_request_time"))


def _show_queue(queue: dict[str, Any] | None) -> None:
    if queue is None:
        typer.echo("this server does not tell what waits (it has no route `queue`)")
        return
    typer.echo(f"{queue['total']} of your requests wait, {len(queue['failed'])} failed in the last 24 hours")
    if queue["waiting"]:
        print_table(
            ("waits", "for", "seconds left", "why"),
            [
                (
                    each["kind"],
                    each.get("training_run_id") or each.get("sampling_session_id"),
                    None if each.get("seconds_left") is None else round(each["seconds_left"], 1),
                    each["reason"],
                )
                for each in queue["waiting"][:RUNS]
            ],
            right=("seconds left",),
        )
