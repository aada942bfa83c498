"""`tinsmith chat`: a conversation, or one question."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from app.commands.client import DEFAULT_URL, ApiKey, AsJson, DataDir, Server, Url, connect
from app.commands.output import STOPPED, USAGE, fail, plain, print_json, write
from app.commands.sample import MaxTokens, Model, Seed, Temperature, TopP

app = typer.Typer(add_completion=False)


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="One message; without it a conversation begins.")
    ] = None,
    *,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    top_p: TopP = None,
    seed: Seed = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a base model or a checkpoint with the model's own chat template. An empty line or Ctrl-D ends it."""
    from app.commands.talking import first_model

    if message is None and as_json:
        raise fail("--json answers one message", "give the message as an argument", USAGE)
    server = connect(url, api_key, data_dir)
    options = {"model": model or first_model(server), "max_tokens": max_tokens, "temperature": temperature}
    options |= {"top_p": top_p, "seed": seed}
    said: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    try:
        if message is not None:
            text, reason = _answer(server, options, [*said, {"role": "user", "content": message}], show=not as_json)
            if as_json:
                print_json("chat", {"model": options["model"], "text": text, "finish_reason": reason})
            return
        typer.echo(f"{plain(options['model'])}: an empty line ends the conversation", err=True)
        while (line := _ask()) is not None:
            said.append({"role": "user", "content": line})
            text, _ = _answer(server, options, said, show=True)
            said.append({"role": "assistant", "content": text})
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None


def _ask() -> str | None:
    """The next line of the conversation; None at its end."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.strip() or None


def _answer(
    server: Server, options: dict[str, Any], messages: list[dict[str, str]], *, show: bool
) -> tuple[str, str | None]:
    """What the model says, shown as it comes, and why it stopped."""
    from app.commands.talking import pieces

    drawn, reason = [], None
    for chunk in pieces(server, "chat/completions", {**options, "messages": messages}):
        for choice in chunk.get("choices", []):
            piece = (choice.get("delta") or {}).get("content") or ""
            reason = choice.get("finish_reason") or reason
            drawn.append(piece)
            if show:
                write(piece)
    if show:
        typer.echo()
    return "".join(drawn), reason
