"""Which of the cookbook's programs run, and how small.

Each is `python -m MODULE key=value ...`, as a user types it; only the sizes are chosen here. The name of the model and
the log folder are added to all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name that the cookbook knows: it takes the renderer by it (plain ChatML). The weights behind it are SmolLM2's."""

NLL, REWARD = "train_mean_nll", "env/all/reward/total"
LOOP: Mapping[str, object] = {"batch_size": 8, "lora_rank": 8}
RESUMABLE: Mapping[str, object] = {"behavior_if_log_dir_exists": "resume"}
ARITHMETIC: Mapping[str, object] = {
    "env": "arithmetic",
    "group_size": 4,
    "groups_per_batch": 4,
    "lora_rank": 8,
    "learning_rate": 1e-4,
    "max_tokens": 5,
    "eval_every": 0,
    "save_every": 0,
    **RESUMABLE,
}


@dataclass(frozen=True)
class Run:
    """One program.

    Attributes:
        label: what the report calls it.
        module: what `python -m` runs, below `tinker_cookbook`.
        metric: the number that the report follows, a key of the cookbook's metrics.jsonl.
        log: name of the log folder. A run that gets the folder of an earlier one goes on from its last checkpoint.
        options: `key=value`. A value `sampler:LOG` stands for the last sampler checkpoint of that log folder.
        proof: a key that is logged only with an optimizer step. RL skips steps in which all rewards are equal.
        kill_at: end the program with SIGKILL once it has logged this step, instead of waiting for it.
    """

    label: str
    module: str
    metric: str
    log: str
    options: Mapping[str, object]
    proof: str = "grad_norm"
    kill_at: int | None = None


def runs() -> list[Run]:
    """All of them, in an order in which later ones find the checkpoints of earlier ones."""
    sl_loop = {**LOOP, "learning_rate": 5e-4, "save_every": 2, "max_steps": 5}
    rl_loop = {
        "batch_size": 2,
        "group_size": 8,
        "lora_rank": 8,
        "learning_rate": 1e-4,
        "max_tokens": 14,
        "max_steps": 2,
    }
    chat = {**LOOP, "dataset": "conversations.jsonl", "learning_rate": 5e-4, "save_every": 4, "eval_every": 0}
    dpo = {"dataset": "hhh", "batch_size": 4, "learning_rate": 1e-4, "max_length": 256, "max_steps": 3, **RESUMABLE}
    distill = {
        "dataset": "tulu3",
        "teacher_model": MODEL,
        "teacher_checkpoint": "sampler:chat-sl",
        "group_size": 2,
        "groups_per_batch": 4,
        "lora_rank": 8,
        "learning_rate": 5e-4,
        "max_tokens": 16,
        "max_steps": 3,
        "eval_every": 0,
        "save_every": 0,
        **RESUMABLE,
    }
    return [
        Run("supervised, plain loop, killed", "recipes.sl_loop", NLL, "sl-loop", sl_loop, kill_at=2),
        Run("the same, resumed", "recipes.sl_loop", NLL, "sl-loop", sl_loop),
        Run("supervised, pipelined", "recipes.chat_sl.train", NLL, "chat-sl", {**chat, "max_steps": 5, **RESUMABLE}),
        Run(
            "RL, plain loop, importance_sampling",
            "recipes.rl_loop",
            "reward/total",
            "rl-loop",
            {**rl_loop, "loss_fn": "importance_sampling"},
        ),
        Run("RL, stable_reinforce", "recipes.math_rl.train", REWARD, "rl", {**ARITHMETIC, "max_steps": 3}),
        Run("the same, resumed", "recipes.math_rl.train", REWARD, "rl", {**ARITHMETIC, "max_steps": 5}),
        Run(
            "RL, importance_sampling, KL after the step",
            "recipes.math_rl.train",
            REWARD,
            "rl-is",
            {**ARITHMETIC, "loss_fn": "importance_sampling", "compute_post_kl": True, "max_steps": 3},
        ),
        Run(
            "RL, asynchronous, 2 steps off-policy",
            "recipes.math_rl.train",
            REWARD,
            "rl-async",
            {**ARITHMETIC, "max_steps_off_policy": 2, "max_steps": 3},
        ),
        Run("DPO", "recipes.preference.dpo.train", "dpo_loss", "dpo", dpo, proof="dpo_loss"),
        Run(
            "distillation, on-policy",
            "recipes.distillation.on_policy_distillation",
            "teacher_kl",
            "distill",
            distill,
        ),
    ]
