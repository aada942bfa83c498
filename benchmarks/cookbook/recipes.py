"""Which of the cookbook's programs run, and how small.

Each is `python -m MODULE key=value ...`, as a user types it; only the sizes are chosen here. The name of the model and
the log folder are added to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name that the cookbook knows: it takes the renderer by it (plain ChatML). The weights behind it are SmolLM2's."""

THINKING = "Qwen/Qwen3.5-9B"
"""A name that two programs ask for themselves. Its renderer wants `</think>` to be one token, so the tokenizer behind
it has two unused tokens renamed; the weights are the same."""

RENDERER = "qwen3_instruct"
NLL, REWARD, KL = "train_mean_nll", "env/all/reward/total", "optim/kl_sample_train_v1"
LOOP: Mapping[str, object] = {"batch_size": 8, "lora_rank": 8}
RESUMABLE: Mapping[str, object] = {"behavior_if_log_dir_exists": "resume"}
SELDOM: Mapping[str, object] = {"eval_every": 0, "save_every": 0}
ARITHMETIC: Mapping[str, object] = {
    "env": "arithmetic",
    "group_size": 4,
    "groups_per_batch": 4,
    "lora_rank": 8,
    "learning_rate": 1e-4,
    "max_tokens": 5,
    **SELDOM,
    **RESUMABLE,
}


@dataclass(frozen=True)
class Run:
    """One program.

    Attributes:
        label: what the report calls it; unique.
        module: what `python -m` runs, below `tinker_cookbook`.
        metric: the number that the report follows, a key of the cookbook's metrics.jsonl.
        log: name of the log folder. A run that gets the folder of an earlier one goes on from its last checkpoint.
        options: `key=value`. A value `sampler:LOG` stands for the last sampler checkpoint of that log folder.
        proof: a key that is logged only with an optimizer step. Where a small model may get equal rewards
            everywhere, which has no gradient, it is the reward itself.
        kill_at: end the program with SIGKILL once it has logged this step, instead of waiting for it.
        model_option: the program's option for the model, None if it has none.
        log_option: its option for the log folder, None if it has none.
        begins: what the number is at first, with the difference allowed.
        falls: whether the last number must be below the first.
        prints: instead of logging the number the program prints it; the pattern's group.
        typed: what is typed into the program.
    """

    label: str
    module: str
    metric: str
    log: str
    options: Mapping[str, object]
    proof: str = "grad_norm"
    kill_at: int | None = None
    model_option: str | None = "model_name"
    log_option: str | None = "log_path"
    begins: tuple[float, float] | None = None
    falls: bool = False
    prints: str | None = None
    typed: str | None = None


def runs() -> list[Run]:
    """All of them, in an order in which later ones find the checkpoints of earlier ones."""
    return [*supervised(), *reinforced(), *played(), *preferred(), *distilled(), *evaluated()]


def supervised() -> Iterator[Run]:
    """Supervised fine-tuning, killed and resumed, and a prompt distilled into weights."""
    loop = {**LOOP, "learning_rate": 5e-4, "save_every": 2, "max_steps": 5}
    chat = {**LOOP, "dataset": "conversations.jsonl", "learning_rate": 5e-4, "save_every": 4, "eval_every": 0}
    basic = {
        "dataset_builder": "NoRobotsBuilder",
        "dataset_builder.common_config.model_name_for_tokenizer": MODEL,
        "dataset_builder.common_config.renderer_name": RENDERER,
        "dataset_builder.common_config.max_length": 256,
        "dataset_builder.common_config.batch_size": 8,
        "lora_rank": 8,
        "max_steps": 3,
        **SELDOM,
    }
    distilled_prompt = {**LOOP, "file_path": "languages.jsonl", "learning_rate": 1e-3, "num_epochs": 5, **SELDOM}
    yield Run("supervised, plain loop, killed", "recipes.sl_loop", NLL, "sl-loop", loop, kill_at=2)
    yield Run("the plain loop, resumed", "recipes.sl_loop", NLL, "sl-loop", loop)
    yield Run("supervised, pipelined", "recipes.chat_sl.train", NLL, "chat-sl", {**chat, "max_steps": 5, **RESUMABLE})
    yield Run("supervised, basic", "recipes.sl_basic", NLL, "sl-basic", basic)
    yield Run(
        "prompt distillation, 5 times the same data",
        "recipes.prompt_distillation.train",
        NLL,
        "prompt",
        distilled_prompt,
        falls=True,
    )


def reinforced() -> Iterator[Run]:
    """RL with a reward that a program checks."""
    loop = {
        "batch_size": 2,
        "group_size": 8,
        "lora_rank": 8,
        "learning_rate": 1e-4,
        "max_tokens": 14,
        "max_steps": 2,
        "loss_fn": "importance_sampling",
    }
    basic = {
        "dataset_builder": "Gsm8kDatasetBuilder",
        "dataset_builder.batch_size": 2,
        "dataset_builder.group_size": 4,
        "dataset_builder.renderer_name": RENDERER,
        "dataset_builder.model_name_for_tokenizer": MODEL,
        "lora_rank": 8,
        "max_tokens": 14,
        "max_steps": 2,
        "save_every": 0,
    }
    post = {"loss_fn": "importance_sampling", "compute_post_kl": True, "max_steps": 3}
    stream = {"loss_fn": "ppo", "stream_minibatch_config.num_minibatches": 2, "max_steps": 2}
    stream |= {"stream_minibatch_config.groups_per_batch": 4}
    counting = {
        "renderer_name": RENDERER,
        "group_size": 2,
        "groups_per_batch": 2,
        "lora_rank": 8,
        "max_tokens": 24,
        "max_trajectory_tokens": 2048,
        "task.num_pages_min": 1,
        "task.num_pages_max": 2,
        "task.page_chars": 300,
        "max_steps": 2,
        **SELDOM,
    }
    math = "recipes.math_rl.train"
    yield Run("RL, plain loop, importance_sampling", "recipes.rl_loop", "reward/total", "rl-loop", loop)
    yield Run("RL, basic", "recipes.rl_basic", REWARD, "rl-basic", basic, proof=REWARD)
    yield Run("RL, stable_reinforce", math, REWARD, "rl", {**ARITHMETIC, "max_steps": 3})
    yield Run("stable_reinforce, resumed", math, REWARD, "rl", {**ARITHMETIC, "max_steps": 5})
    yield Run("RL, importance_sampling, KL after the step", math, REWARD, "rl-is", {**ARITHMETIC, **post})
    yield Run("RL, ppo, streamed minibatches", math, REWARD, "rl-stream", {**ARITHMETIC, **stream})
    yield Run(
        "RL, asynchronous, 2 steps off-policy",
        math,
        REWARD,
        "rl-async",
        {**ARITHMETIC, "max_steps_off_policy": 2, "max_steps": 3},
    )
    yield Run(
        "tool use over several turns: counting",
        "recipes.rl_numerics_check.train",
        REWARD,
        "tools",
        counting,
        proof=REWARD,
    )


def played() -> Iterator[Run]:
    """Games of several turns."""
    small = {"renderer_name": RENDERER, "max_tokens": 8, "max_steps": 1, **SELDOM}
    for label, module, log, more in (
        ("multi-turn: guess a number", "guess_number", "guess", {"group_size": 2, "batch_size": 2}),
        (
            "multi-turn: twenty questions, a second model answers",
            "twenty_questions",
            "twenty",
            {"group_size": 2, "batch_size": 1},
        ),
        (
            "two players: tic-tac-toe",
            "text_arena",
            "arena",
            {"batch_size": 4, "num_train_datapoints": 8, "num_test_datapoints": 2, "test_opponent": "random"},
        ),
    ):
        yield Run(label, f"recipes.multiplayer_rl.{module}.train", REWARD, log, {**small, **more}, proof=REWARD)


def preferred() -> Iterator[Run]:
    """Preferences: DPO, comparisons in pairs, and a learned reward."""
    dpo = {"dataset": "hhh", "batch_size": 4, "learning_rate": 1e-4, "max_length": 256, "max_steps": 3, **RESUMABLE}
    shorter = {
        "renderer_name": RENDERER,
        "batch_size": 2,
        "group_size": 4,
        "max_tokens": 12,
        "learning_rate": 1e-4,
        "eval_every": 0,
        "max_steps": 2,
    }
    rlhf = {
        "short_name": "small",
        "lora_rank": 8,
        "max_length": 256,
        "batch_size": 4,
        "rl_max_tokens": 8,
        "rl_group_size": 2,
        "max_steps": 1,
        **SELDOM,
    }
    log_2 = 0.693147
    yield Run("DPO", "recipes.preference.dpo.train", "dpo_loss", "dpo", dpo, proof="dpo_loss", begins=(log_2, 1e-3))
    yield Run("pairs: the shorter answer", "recipes.preference.shorter.train", REWARD, "shorter", shorter)
    yield Run(
        "RLHF: supervised, reward model, RL",
        "recipes.preference.rlhf.rlhf_pipeline",
        REWARD,
        "rlhf-small/rl",
        rlhf,
        proof=REWARD,
        model_option="base_model",
        log_option=None,
    )


def distilled() -> Iterator[Run]:
    """Students that learn from a teacher: the adapter of the pipelined supervised run."""
    student = {
        "group_size": 2,
        "lora_rank": 8,
        "learning_rate": 5e-4,
        "max_tokens": 16,
        **SELDOM,
        **RESUMABLE,
    }
    one = {
        "dataset": "tulu3",
        "teacher_model": MODEL,
        "teacher_checkpoint": "sampler:chat-sl",
        "groups_per_batch": 4,
        "max_steps": 3,
    }
    two = {
        "deepmath_teacher_model": MODEL,
        "tulu3_teacher_model": MODEL,
        "tulu3_teacher_checkpoint": "sampler:chat-sl",
        "deepmath_groups_per_batch": 2,
        "tulu3_groups_per_batch": 2,
        "max_steps": 2,
    }
    off_policy = {**LOOP, "renderer_name": RENDERER, "max_length": 256, "buffer_size": 16, "max_prompts": 32}
    off_policy |= {"max_steps": 3, **SELDOM}
    itself = {"groups_per_batch": 2, "lora_rank": 8, "learning_rate": 5e-4, "max_tokens": 16, "max_steps": 2, **SELDOM}
    kl = "teacher_kl"
    yield Run(
        "distillation, on-policy",
        "recipes.distillation.on_policy_distillation",
        kl,
        "distill",
        {**student, **one},
    )
    yield Run(
        "distillation, two teachers",
        "recipes.distillation.on_policy_multi_teacher",
        kl,
        "teachers",
        {**student, **two},
    )
    yield Run("distillation, off-policy", "recipes.distillation.off_policy_reasoning", NLL, "off-policy", off_policy)
    yield Run(
        "self-distillation (top-20 logprobs of the teacher)",
        "recipes.sdft.train",
        "sdft/mean_teacher_entropy",
        "sdft",
        itself,
    )


def evaluated() -> Iterator[Run]:
    """Programs that only sample."""
    yield Run(
        "evaluation with inspect, graded by a second model",
        "eval.run_inspect_evals",
        "tokens of answers, of verdicts",
        "inspect",
        {
            "tasks": "tinker_cookbook.eval.custom_inspect_task:example_lm_as_judge",
            "renderer_name": RENDERER,
            "max_tokens": 16,
            "temperature": 0.0,
        },
        log_option=None,
        prints=r"tokens \[I: [\d,]+, O: (\d+)\]",
    )
    yield Run(
        "decisions: probabilities of choices",
        "recipes.decisions.demo",
        "probability of each of 4 choices",
        "decisions",
        {},
        log_option=None,
        prints=r'"\w+": ([\d.]+)',
        typed="How do I pay an invoice?\n\n",
    )
