"""`tinsmith runs`: the training runs of the project."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Url, connect
from app.commands.output import print_facts, print_json, print_table, time_text
from app.commands.status import NO_RUNS, run_state
from app.commands.values import run_route

app = typer.Typer(help="Training runs of your project: list, show, watch.", no_args_is_help=True)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The training run, as `runs list` shows it.")]


@app.command("list")
def list_runs(
    *,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most, the newest first.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="How many of the newest to leave out.")] = 0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """The project's training runs, newest first."""
    answer = connect(url, api_key, data_dir).get("training_runs", limit=limit, offset=offset)
    runs = answer["training_runs"]
    if as_json:
        print_json("runs", {"runs": runs, "total": answer["cursor"]["total_count"]})
        return
    print_table(
        ("run", "base model", "rank", "state", "last request", "last checkpoint"),
        [
            (
                run["training_run_id"],
                run["base_model"],
                run.get("lora_rank"),
                run_state(run),
                time_text(run.get("last_request_time")),
                (run.get("last_checkpoint") or {}).get("checkpoint_id"),
            )
            for run in runs
        ],
        right=("rank",),
        empty=NO_RUNS if not offset else f"there are only {answer['cursor']['total_count']}: give a smaller --offset",
    )
    if offset + len(runs) < answer["cursor"]["total_count"]:
        typer.echo(f"{answer['cursor']['total_count']} in all: --limit and --offset show the others", err=True)


@app.command("show")
def show_run(
    run_id: RunId,
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """One training run and its checkpoints."""
    route, server = run_route(run_id), connect(url, api_key, data_dir)
    run = server.get(route)
    checkpoints = server.get(f"{route}/checkpoints")["checkpoints"]
    if as_json:
        print_json("run", {"run": run, "checkpoints": checkpoints})
        return
    print_facts(_facts(run))
    if checkpoints:
        from app.commands.checkpoints import print_checkpoints

        typer.echo()
        print_checkpoints(checkpoints)


def _facts(run: dict[str, Any]) -> dict[str, object]:
    metadata = run.get("user_metadata") or {}
    return {
        "run": run["training_run_id"],
        "base model": run["base_model"],
        "rank": run.get("lora_rank"),
        "state": run_state(run),
        "project": run["model_owner"],
        "created": time_text(run.get("created_time")),
        "last request": time_text(run.get("last_request_time")),
        "metadata": ", ".join(f"{name}={value}" for name, value in metadata.items()),
    }


@app.command("watch")
def watch_run(
    run_id: RunId,
    *,
    lines: Annotated[bool, typer.Option("--lines", help="One line for each step, also in a terminal.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and end.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Loss, learning rate and gradient norm of a run, live: charts in a terminal, else a line for each step.

    Ends when the run does, or with Ctrl-C; goes on when the server is started again. With --json the steps so far are
    written at once, as one document.
    """
    from app.commands.watch import Watch

    watch = Watch(connect(url, api_key, data_dir), run_id)
    if as_json:
        print_json("metrics", watch.all())
    else:
        watch.show(lines=lines, once=once)
