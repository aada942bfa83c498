# %% [markdown]
# # A loss of your own
#
# The server has the usual losses. Another one is written in PyTorch and uploaded: the SDK traces the function, the
# server checks the graph and runs it in one pass, with the exact gradient. First a loss that the server has already,
# to see that the two agree; then one that it does not have.

# %%
import torch
from common import answer_ids, ask, connect, options, plot, shifted
from tinker import types

chosen = options("A custom loss.", steps=8, learning_rate=1e-3, rank=8)
service = connect(chosen)


def new_client():
    """Equal seeds: equal adapters."""
    return service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1).result()


# %% [markdown]
# ## The same as `ppo`
#
# The function sees one example: the logprobs of its targets, and the inputs that it names, as tensors.


# %%
def my_ppo(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean()}


handle = service.create_custom_loss(my_ppo, {"logprobs": 1, "old": 1, "advantages": 1}).result()

mine, builtin = new_client(), new_client()
tokenizer = mine.get_tokenizer()
prompt, answer = ask(tokenizer, "What is tin?"), answer_ids(tokenizer, "A soft white metal.")
present = (
    builtin.forward([shifted(prompt, answer)], loss_fn="cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
)
# As if the tokens had been drawn by a slightly different model: ratios on both sides of the bounds.
old = [value + 0.4 * (-1) ** i for i, value in enumerate(present[len(prompt) - 1 :])]
advantages = [1.0 if i % 3 else -0.5 for i in range(len(answer))]

ours = mine.forward_backward_custom([shifted(prompt, answer, old=old, advantages=advantages)], handle)
theirs = builtin.forward_backward([shifted(prompt, answer, logprobs=old, advantages=advantages)], loss_fn="ppo")
step = types.AdamParams(learning_rate=chosen.learning_rate)
norms = [client.optim_step(step).result().metrics["grad_norm"] for client in (mine, builtin)]
sums = [future.result().metrics["loss:sum"] for future in (ours, theirs)]
print(f"loss: {sums[0]:.6f} and {sums[1]:.6f}; gradient norm: {norms[0]:.6f} and {norms[1]:.6f}")


# %% [markdown]
# ## One that is not built in
#
# Focal loss: tokens that are likely already count less, so that the step goes where the model is still wrong.


# %%
def focal(logprobs, weights):
    loss = -((1 - torch.exp(logprobs)) ** 2 * logprobs * weights).sum()
    return loss, {"custom/likely:mean": (torch.exp(logprobs) * weights).sum() / weights.sum()}


focal_handle = service.create_custom_loss(focal, {"logprobs": 1, "weights": 1}).result()
client = new_client()
data = [shifted(prompt, answer, weights=[1] * len(answer))]
losses: list[float] = []
likely: list[float] = []
for number in range(chosen.steps):
    gradient = client.forward_backward_custom(data, focal_handle)
    client.optim_step(step).result()
    metrics = gradient.result().metrics
    losses.append(metrics["loss:sum"])
    likely.append(metrics["custom/likely:mean"])
    print(f"step {number}: loss {losses[-1]:.3f}, mean probability {likely[-1]:.3f}")

plot("focal loss", "step", {"loss": losses, "mean probability": likely})
service.close("success").result()
