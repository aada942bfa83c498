"""`tinsmith sample`: a text goes on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Url, connect
from app.commands.output import STOPPED, fail, print_json, write
from app.commands.values import finite

app = typer.Typer(add_completion=False)

Model = Annotated[
    str | None,
    typer.Option(help="Base model, or the tinker:// path of a checkpoint. Default: the server's first base model."),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, callback=finite, help="0 takes the likeliest token each time.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this share.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same answer.")]


@app.command()
def sample(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on with; - reads it from stdin.")],
    *,
    model: Model = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Complete a text with a base model or a checkpoint; the answer is written as it is drawn."""
    from app.commands.talking import first_model, pieces

    server = connect(url, api_key, data_dir)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise fail("the prompt is empty", "give at least one character")
    body = {
        "model": model or first_model(server),
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
    }
    drawn, reason = [], None
    try:
        for chunk in pieces(server, "completions", body):
            for choice in chunk.get("choices", []):
                piece = choice.get("text") or ""
                reason = choice.get("finish_reason") or reason
                drawn.append(piece)
                if not as_json:
                    write(piece)
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    if as_json:
        print_json("sample", {"model": body["model"], "text": "".join(drawn), "finish_reason": reason})
    else:
        typer.echo()
