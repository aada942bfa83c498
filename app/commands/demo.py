"""`tinsmith demo`: the quickstart example, on a server that is running."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from app.commands.client import DEFAULT_URL, ApiKey, DataDir, Server, Url, connect
from app.commands.output import FAILED, NOT_ALLOWED, fail, say
from app.commands.values import finite

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    model: Annotated[str | None, typer.Option(help="Base model; without it the first one that the server has.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    learning_rate: Annotated[float, typer.Option(min=0.0, callback=finite, help="Learning rate of AdamW.")] = 1e-3,
    rank: Annotated[int, typer.Option(min=1, help="LoRA rank.")] = 16,
    output: Annotated[Path, typer.Option(help="Where to put the adapter.")] = Path("quickstart-adapter"),
) -> None:
    """Fine-tune a model on a few poems, on a server that is running (examples/quickstart.py)."""
    quickstart = _load_quickstart()
    server = connect(url, api_key, data_dir)
    first = _first_model(server)  # also with a model given: the client would try for minutes, without a word
    model = model or first
    import tinker

    try:
        report = quickstart.run(
            base_url=server.url,
            api_key=server.key,
            model=model,
            steps=steps,
            learning_rate=learning_rate,
            rank=rank,
            output=output,
        )
        say(f"next: {' '.join(_called(url, data_dir))} --model {report.checkpoint}", err=True)
    except tinker.TinkerError as error:
        told = getattr(error, "body", None)
        cause = told.get("detail") if isinstance(told, dict) else None
        refused = getattr(error, "status_code", None) in (401, 403)
        raise fail(
            f"the demo failed: {cause or error}",
            "`tinsmith status` says how the server is and what it serves",
            NOT_ALLOWED if refused else FAILED,
        ) from None


def _called(url: str, data_dir: Path | None) -> list[str]:
    """`tinsmith chat` for the same server, with the program as it was called: it need not be on the PATH."""
    words = [sys.argv[0], "chat"]
    if url not in (DEFAULT_URL, os.environ.get("TINSMITH_URL")):
        words += ["--url", url]
    if data_dir is not None:
        words += ["--data-dir", str(data_dir)]
    return [shlex.quote(word) for word in words]


def _first_model(server: Server) -> str:
    return str(server.get("get_server_capabilities")["supported_models"][0]["model_name"])


def _load_quickstart() -> ModuleType:
    """The example beside the source code: it is not part of the installed package."""
    file = Path(__file__).parents[2] / "examples" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("tinsmith_quickstart", file)
    if not file.exists() or spec is None or spec.loader is None:
        raise fail("the demo is not part of the installed package", "run it in the project's folder: `make demo`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise fail(f"the demo needs the client: {error.name} is missing", "pip install 'tinsmith[client]'") from None
    return module
