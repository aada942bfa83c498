"""What the runs did, as lines for the terminal and as the page docs/cookbook.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cookbook.execute import SAME_MODEL, Outcome, repeated

REQUIREMENTS = Path(__file__).with_name("requirements.txt")

PAGE = """# The cookbook

The unmodified `tinker-cookbook` {version} runs against this server. The table is written by `make cookbook`: a real
server with SmolLM2-135M-Instruct, served under names that the cookbook knows, and the cookbook's own programs as they
are installed, without the network, small. `make cookbook ARGS="--only chat-sl distill"` runs a part, and this page
keeps the rows of the others.

{table}

{missing}Weights: {download}

Measured on {machine}, shared with other work (load average {load:.1f} at the end); seconds include the start of each
program, {total:.0f} s in all.

* Every step is another batch of a few examples, so first and last number show that a program runs, not how well the
  model learns. Where the data repeat (prompt distillation) the loss must fall, or the command fails; DPO must begin at
  log 2 = 0.6931, what it is when the policy is still the reference.
* **sampler − trainer** is the cookbook's `optim/kl_sample_train_v1` at the first step: the mean, over the sampled
  tokens, of the logprob that the sampler gave less the one that the trainer gives. Both compute in float32 here; more
  than {same:g} makes the command fail.
* The games and the tool are far beyond a 135M model: it loses all of them, and equal rewards give no gradient. What
  these rows show is that many turns, two players, tools and a second model work.
* **killed, resumed**: the first program is ended with SIGKILL after it has logged step 2. The second is the same
  command again: it finds the checkpoint made before step 2 in its log folder, restores weights and optimizer from
  it, and repeats that step. Its loss before the kill and after: {repeated}.
* **stable_reinforce** is the cookbook's default loss for RL; see [losses.md](losses.md) for what it is here.
* **distillation**: the teacher is the sampler checkpoint of the pipelined supervised run, the number of the on-policy
  ones the KL from it. Of the two teachers the other one is the base model.
* **evaluation** and **decisions** only sample; the columns first and last are the first and last number printed. The
  judge of the evaluation is a 135M model too. It says nothing, so there is no accuracy: the row shows that the
  program asks, samples and judges.
* Data sets of the hub are replaced by small ones in the same form, made of the conversations that the cookbook ships
  and of questions that a small model sometimes gets right (`benchmarks/cookbook/data.py`).

## What was not run, and why

| program | why |
|---|---|
| `recipes.code_rl`, `recipes.harbor_rl`, distillation on harbor's tasks | run code in sandboxes of a cloud service |
| `recipes.search_tool` | wants embeddings of a cloud service and a vector database |
| `recipes.verifiers_rl` | environments come from a hub of their own, with packages that need other versions |
| `recipes.forecasting`, `recipes.decisions.forecasting` | fetch their questions over the network |
| `recipes.vlm_classifier`, `recipes.audio` | images and sound: base models here read text |
| `recipes.prompt_distillation.create_data` | asks a 35B teacher by name; serve one under that name |
| `recipes.rubric` | its judge may write 2,048 tokens a rating; a step of four took eight minutes here, and went well |
| `recipes.true_thinking_score` | measures the thoughts of a model that thinks; the small one does not |
| `eval.benchmarks` | data sets of the hub; some need sandboxes. `inspect` goes through the same sampler |

## Run a recipe yourself

    tinsmith serve --base-model Qwen/Qwen3-4B-Instruct-2507=FOLDER       # FOLDER: any model with ChatML tokens
    tinsmith tokenizer Qwen/Qwen3-4B-Instruct-2507 FOLDER                # only where clients cannot reach the hub
    export TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-... HF_HUB_OFFLINE=1
    python -m tinker_cookbook.recipes.math_rl.train model_name=Qwen/Qwen3-4B-Instruct-2507 env=arithmetic

* The cookbook takes renderer and learning rate from a table by the model's name. Serve your model under a name of
  that table, or give `renderer_name=` and `learning_rate=`.
* Recipes whose renderer is `qwen3_5_disable_thinking` by default run with `renderer_name=qwen3_instruct` on any model
  with ChatML tokens. Twenty questions and the judge of `custom_inspect_task` ask for `Qwen/Qwen3.5-9B` themselves;
  serve something under that name whose tokenizer has `</think>` as one token.
* `sl_basic` and `rl_basic` have a ready-made data set. Another size, or another data set, is
  `dataset_builder=Gsm8kDatasetBuilder dataset_builder.batch_size=2 ...`, with all of the builder's fields.
* `tinker-cookbook` asks for a `tml-renderers` that the package index may not have. It is needed for two model
  families only: `benchmarks/cookbook/requirements.txt` has versions that work, for `pip install --no-deps -r`.
"""


def line(outcome: Outcome) -> str:
    """One run for the terminal."""
    return (
        f"{outcome.label:<56}{len(outcome.steps):>3} steps  {outcome.metric} "
        f"{outcome.values[0]:.4f} -> {outcome.values[-1]:.4f}  {outcome.seconds:.0f} s"
    )


def download_line(seconds: float, files: Sequence[str]) -> str:
    """The download of a checkpoint, in one sentence."""
    return (
        f"`weights.download` of a training checkpoint (exported encrypted, decrypted by the client): "
        f"{', '.join(files)} in {seconds:.0f} s."
    )


def page(outcomes: Sequence[Outcome], fetched: tuple[float, Sequence[str]], missing: Sequence[str]) -> str:
    """The whole page. `missing`: labels of runs that have no outcome."""
    head = [
        "| | program | steps | number | first | last | sampler − trainer | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    version = next(
        text.partition("==")[2].strip()
        for text in REQUIREMENTS.read_text().splitlines()
        if text.startswith("tinker-cookbook==")
    )
    return PAGE.format(
        version=version,
        table="\n".join([*head, *map(_row, outcomes)]),
        missing=f"Without a result so far: {'; '.join(missing)}.\n\n" if missing else "",
        download=download_line(*fetched),
        machine=f"{os.cpu_count()} CPU cores ({platform.machine()})",
        total=sum(o.seconds for o in outcomes) + fetched[0],
        load=os.getloadavg()[2],
        same=SAME_MODEL,
        repeated=", ".join(f"step {step}: {old:.6f} and {new:.6f}" for step, old, new in repeated(*outcomes[:2])),
    )


def _row(outcome: Outcome) -> str:
    apart = "" if outcome.apart is None else f"{outcome.apart:.0e}"
    cells = [
        outcome.label,
        f"`{outcome.module}`",
        f"{outcome.steps[0]}–{outcome.steps[-1]}",
        f"`{outcome.metric}`",
        f"{outcome.values[0]:.4f}",
        f"{outcome.values[-1]:.4f}",
        apart,
        f"{outcome.seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"
