"""What the runs did, as lines for the terminal and as the page docs/cookbook.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from benchmarks.cookbook.environment import REQUIREMENTS
from benchmarks.cookbook.execute import Outcome, repeated

PAGE = """# The cookbook

The unmodified `tinker-cookbook` {version} runs against this server. The
table is written by `make cookbook`: a real server with SmolLM2-135M-Instruct, served under a name that the cookbook
knows as well, and the cookbook's own programs as they are installed, without the network, small. `make cookbook
ARGS="--only chat-sl distill"` runs a part and leaves this page alone.

{table}

Weights: {download}

Measured on {machine} with a load average of {load:.1f}; seconds include the start of each program,
{total:.0f} s in all.

* Every step is another batch of a few examples, so first and last number show that a program runs, not how well the
  model learns.
* **killed, resumed**: the first program is ended with SIGKILL after it has logged step 2. The second is the same
  command again: it finds the checkpoint made before step 2 in its log folder, restores weights and optimizer from
  it, and repeats that step. Its loss before the kill and after: {repeated}.
* **stable_reinforce** is the cookbook's default loss for RL; see [losses.md](losses.md) for what it is here.
* **distillation**: the teacher is the sampler checkpoint of the pipelined supervised run; the number is the KL from
  it.
* Data sets of the hub are replaced by small ones in the same form, made of the conversations that the cookbook ships
  and, for gsm8k, of questions that a small model sometimes gets right (`benchmarks/cookbook/data.py`).

## Run a recipe yourself

    tinsmith serve --base-model Qwen/Qwen3-4B-Instruct-2507=FOLDER       # FOLDER: any model with ChatML tokens
    tinsmith tokenizer Qwen/Qwen3-4B-Instruct-2507 FOLDER                # only where clients cannot reach the hub
    export TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-... HF_HUB_OFFLINE=1
    python -m tinker_cookbook.recipes.math_rl.train model_name=Qwen/Qwen3-4B-Instruct-2507 env=arithmetic

* The cookbook takes renderer and learning rate from a table by the model's name. Serve your model under a name of
  that table, or give `renderer_name=` and `learning_rate=`.
* `tinker-cookbook` asks for a `tml-renderers` that the package index may not have. It is needed for two model
  families only: `benchmarks/cookbook/requirements.txt` has versions that work, for `pip install --no-deps -r`.
"""


def line(outcome: Outcome) -> str:
    """One run for the terminal."""
    return (
        f"{outcome.label:<44}{len(outcome.steps):>3} steps  {outcome.metric} "
        f"{outcome.values[0]:.4f} -> {outcome.values[-1]:.4f}  {outcome.seconds:.0f} s"
    )


def download_line(seconds: float, files: Sequence[str]) -> str:
    """The download of a checkpoint, in one sentence."""
    return (
        f"`weights.download` of a training checkpoint (exported encrypted, decrypted by the client): "
        f"{', '.join(files)} in {seconds:.0f} s."
    )


def page(outcomes: Sequence[Outcome], fetched: tuple[float, Sequence[str]]) -> str:
    """The whole page."""
    head = ["| | program | steps | number | first | last | seconds |", "|---|---|---|---|---|---|---|"]
    body = [
        f"| {o.label} | `{o.module}` | {o.steps[0]}–{o.steps[-1]} | `{o.metric}` | {o.values[0]:.4f} | "
        f"{o.values[-1]:.4f} | {o.seconds:.0f} |"
        for o in outcomes
    ]
    version = next(
        text.partition("==")[2].strip()
        for text in REQUIREMENTS.read_text().splitlines()
        if text.startswith("tinker-cookbook==")
    )
    return PAGE.format(
        version=version,
        table="\n".join([*head, *body]),
        download=download_line(*fetched),
        machine=f"{os.cpu_count()} CPU cores ({platform.machine()})",
        total=sum(o.seconds for o in outcomes) + fetched[0],
        load=os.getloadavg()[2],
        repeated=", ".join(f"step {step}: {old:.6f} and {new:.6f}" for step, old, new in repeated(*outcomes[:2])),
    )
