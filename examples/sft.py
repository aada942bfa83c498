# %% [markdown]
# # Supervised fine-tuning
#
# The smallest training loop there is: examples of questions and answers, the cross-entropy of the answers, AdamW.
# Set `TINKER_BASE_URL` and `TINKER_API_KEY` to your server's, and `TINKER_MODEL` if it serves another model than
# SmolLM2-135M-Instruct.

# %%
from common import answer_ids, ask, connect, options, plot, shifted
from tinker import types

chosen = options("Supervised fine-tuning.", steps=12, learning_rate=1e-3, rank=16, max_tokens=24)

# %% [markdown]
# ## The data
#
# A smith who answers in a manner of their own. One line is kept out of the training.

# %%
LINES = {
    "What is tin?": "Tin be a soft white metal, friend.",
    "What is solder?": "Solder be tin and lead, friend.",
    "What is a lamp?": "A lamp be light in a box, friend.",
    "What is a rivet?": "A rivet be a nail that stays, friend.",
    "What is a hammer?": "A hammer be a fist of iron, friend.",
    "What is a bellows?": "A bellows be a lung of leather, friend.",
}
HELD_OUT = {"What is an anvil?": "An anvil be a bench of iron, friend."}

# %% [markdown]
# ## An adapter, and the data as tokens
#
# The base model stays as it is: what is trained is a LoRA adapter of this run alone. Each token of an example predicts
# the next; the tokens of the question have weight 0, so only the answer is learned. (`shifted` in `common.py` does just
# that.)

# %%
service = connect(chosen)
client = service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1).result()
tokenizer = client.get_tokenizer()


def examples(lines: dict[str, str]) -> list[types.Datum]:
    pairs = [(ask(tokenizer, question), answer_ids(tokenizer, answer)) for question, answer in lines.items()]
    return [shifted(prompt, answer, weights=[1] * len(answer)) for prompt, answer in pairs]


def trained_tokens(data: list[types.Datum]) -> float:
    return sum(sum(datum.loss_fn_inputs["weights"].data) for datum in data)


data, held_out = examples(LINES), examples(HELD_OUT)

# %% [markdown]
# ## The loop
#
# `forward_backward` adds the gradient of a batch to what is there, `optim_step` takes a step and clears it. Both
# return at once with a future; sending the second before waiting for the first lets the server run them back to back.
# Losses are sums, so they are divided by the number of trained tokens here. `forward` computes a loss without a
# gradient.

# %%
losses: list[float] = []
held_out_losses: list[float] = []
for step in range(chosen.steps):
    gradient = client.forward_backward(data, loss_fn="cross_entropy")
    update = client.optim_step(types.AdamParams(learning_rate=chosen.learning_rate))
    check = client.forward(held_out, loss_fn="cross_entropy")
    losses.append(gradient.result().metrics["loss:sum"] / trained_tokens(data))
    held_out_losses.append(check.result().metrics["loss:sum"] / trained_tokens(held_out))
    update.result()
    print(f"step {step}: loss {losses[-1]:.3f}, held out {held_out_losses[-1]:.3f}")

plot("cross-entropy", "step", {"trained": losses, "held out": held_out_losses})

# %% [markdown]
# ## What it says now
#
# Samples come from saved weights, so what is sampled never changes under way.

# %%
sampler = client.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=chosen.max_tokens, temperature=0.0)
for question in [*LINES, *HELD_OUT]:
    prompt = types.ModelInput.from_ints(ask(tokenizer, question))
    tokens = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens
    print(question, "->", tokenizer.decode(tokens, skip_special_tokens=True))

# %% [markdown]
# ## Keep it
#
# A training checkpoint has the optimizer's state too; `create_training_client_from_state_with_optimizer` goes on from
# it.

# %%
checkpoint = client.save_state("sft").result().path
print("saved", checkpoint)
service.close("success").result()
