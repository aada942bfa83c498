"""What the examples share: options from the command line or the environment, and chats as token ids.

Not responsible for anything that an example teaches.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an example that needs no SDK runs without it
    import tinker
    from tinker import types

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
IN_NOTEBOOK = "ipykernel" in sys.modules


def options(about: str, **sizes: Any) -> argparse.Namespace:
    """Server, key and model, and one option for each size: `learning_rate=1e-3` is `--learning-rate`.

    In a notebook the command line is the kernel's: there the environment and the defaults rule.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--base-url",
        default=os.environ.get("TINKER_BASE_URL"),
        help="server (default: TINKER_BASE_URL, else the hosted service)",
    )
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY"), help="key (default: TINKER_API_KEY)")
    parser.add_argument(
        "--model",
        default=os.environ.get("TINKER_MODEL", DEFAULT_MODEL),
        help="base model (default: TINKER_MODEL, else %(default)s)",
    )
    for name, default in sizes.items():
        several = isinstance(default, list)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=type(default[0] if several else default),
            nargs="+" if several else None,
            default=default,
            help="default: %(default)s",
        )
    return parser.parse_args([] if IN_NOTEBOOK else None)


def connect(chosen: argparse.Namespace) -> tinker.ServiceClient:
    """A client of the server; `close()` it at the end, which frees its adapters.

    Ends the program if no server is at the address: the client itself would try for minutes, without a word.
    """
    import tinker

    if chosen.base_url:
        try:
            urllib.request.urlopen(f"{chosen.base_url.rstrip('/')}/api/v1/healthz", timeout=10).close()
        except urllib.error.HTTPError:
            pass  # something answers: the client says what is wrong with it
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise SystemExit(
                f"no server answers at {chosen.base_url} ({reason}): start one, or set TINKER_BASE_URL"
            ) from None
    return tinker.ServiceClient(base_url=chosen.base_url, api_key=chosen.api_key)


def ask(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a chat with one question, up to where the model's answer begins."""
    message = {"role": "user", "content": question}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """Token ids of an answer and of the end of the turn."""
    return [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def shifted(prompt: Sequence[int], answer: Sequence[int], **tensors: Sequence[float]) -> types.Datum:
    """A training example: each token predicts the next one.

    Args:
        tensors: one number for each token of the answer (`weights`, `advantages`, `logprobs`); the prompt gets 0.
    """
    from tinker import types

    tokens = [*prompt, *answer]
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    for name, values in tensors.items():
        padded = [0.0] * (len(prompt) - 1) + [float(value) for value in values]
        inputs[name] = types.TensorData(data=padded, dtype="float32", shape=[len(padded)])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def plot(title: str, x: str, curves: Mapping[str, Sequence[float]], *, at: Sequence[float] | None = None) -> None:
    """Curves over steps (or over `at`, on a logarithmic axis), in a notebook only: a script has printed the numbers."""
    if not IN_NOTEBOOK:
        return
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    for name, values in curves.items():
        axes.plot(range(len(values)) if at is None else at, values, marker=".", label=name)
    if at is not None:
        axes.set_xscale("log")
    axes.set(title=title, xlabel=x)
    axes.legend()
    figure.tight_layout()
    plt.show()
