# %% [markdown]
# # Reinforcement learning with a verifiable reward
#
# The model answers sums. A program checks the answers: no reward model, no labels but the right result. The loop is
# the usual one: sample a group of answers to each question with the present weights, compare each answer's reward
# with the mean of its group, and make the better ones likelier.

# %%
import random
import statistics

from common import ask, connect, options, plot, shifted
from tinker import types

chosen = options(
    "RL with a verifiable reward.",
    steps=8,
    questions=3,
    group=8,
    max_tokens=8,
    learning_rate=4e-4,
    rank=16,
    loss="importance_sampling",
)


# %% [markdown]
# ## The reward
#
# Half of it for the form (only digits), half for the result. A reward that is nearly always 0 teaches nothing: the
# first half gives the model something to begin with.


# %%
def reward(answer: str, right: int) -> float:
    answer = answer.strip()
    digits = sum(each in "0123456789" for each in answer) / max(1, len(answer))
    return 0.5 * digits + 0.5 * (answer == str(right))


# %% [markdown]
# ## The loop
#
# The sampler gives each token's logprob q under the weights that drew it. `importance_sampling` minimises -sum exp(lp
# - q) * advantage: here q is as new as can be, so the ratio is 1 and the gradient is that of REINFORCE. With several
# steps on the same samples try `--loss ppo` or `--loss cispo`, which bound the ratio.

# %%
service = connect(chosen)
client = service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1).result()
tokenizer = client.get_tokenizer()
dice = random.Random(1)
rewards: list[float] = []

for step in range(chosen.steps):
    sampler = client.save_weights_and_get_sampling_client().result()
    asked = []
    for number in range(chosen.questions):
        a, b = dice.randint(1, 9), dice.randint(1, 9)
        prompt = ask(tokenizer, f"What is {a} + {b}? Answer with the number only.")
        seed = 1000 * step + number
        params = types.SamplingParams(max_tokens=chosen.max_tokens, temperature=1.0, seed=seed)
        # All questions are sent before any is waited for: the server draws them in one batch.
        future = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=chosen.group, sampling_params=params)
        asked.append((prompt, a + b, future))

    data: list[types.Datum] = []
    of_this_step: list[float] = []
    for prompt, right, future in asked:
        sequences = future.result().sequences
        texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in sequences]
        of_group = [reward(text, right) for text in texts]
        of_this_step += of_group
        for each, got in zip(sequences, of_group, strict=True):
            advantage = got - statistics.mean(of_group)
            if advantage:  # a group that agrees has nothing to teach
                n = len(each.tokens)
                data.append(shifted(prompt, each.tokens, logprobs=each.logprobs, advantages=[advantage] * n))

    rewards.append(statistics.mean(of_this_step))
    print(f"step {step}: reward {rewards[-1]:.3f}, the last answer: {texts[-1]!r}")
    if data:
        gradient = client.forward_backward(data, loss_fn=chosen.loss)
        update = client.optim_step(types.AdamParams(learning_rate=chosen.learning_rate))
        gradient.result()
        update.result()

# %%
plot("mean reward", "step", {"reward": rewards})
service.close("success").result()
