# %% [markdown]
# # A sweep: many adapters at once
#
# The server trains many adapters on one copy of the base model and computes them in the same passes. So a sweep over
# learning rates is a loop that sends the work of all runs before it waits for any. Each run's numbers are those that
# it would have alone: in float32 on a CPU bit for bit.

# %%
import math
import time

from common import answer_ids, ask, connect, options, plot, shifted
from tinker import types

chosen = options("A sweep over learning rates.", steps=6, learning_rates=[3e-5, 3e-4, 3e-3, 3e-2], rank=8)

# %%
LINES = {
    "What is tin?": "Tin be a soft white metal, friend.",
    "What is solder?": "Solder be tin and lead, friend.",
    "What is a lamp?": "A lamp be light in a box, friend.",
    "What is a rivet?": "A rivet be a nail that stays, friend.",
}
HELD_OUT = {"What is a hammer?": "A hammer be a fist of iron, friend."}

service = connect(chosen)
# Creation is a future as well: all runs are created side by side, with the same seed.
pending = [
    service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1)
    for _ in chosen.learning_rates
]
clients = [each.result() for each in pending]
tokenizer = clients[0].get_tokenizer()


def examples(lines: dict[str, str]) -> list[types.Datum]:
    pairs = [(ask(tokenizer, question), answer_ids(tokenizer, answer)) for question, answer in lines.items()]
    return [shifted(prompt, answer, weights=[1] * len(answer)) for prompt, answer in pairs]


data, held_out = examples(LINES), examples(HELD_OUT)
held_out_tokens = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in held_out)

# %% [markdown]
# ## Everything is sent, then everything is awaited

# %%
began = time.monotonic()
futures = []
for client, rate in zip(clients, chosen.learning_rates, strict=True):
    checks = []
    for _ in range(chosen.steps):
        client.forward_backward(data, loss_fn="cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=rate))
        checks.append(client.forward(held_out, loss_fn="cross_entropy"))
    futures.append(checks)

curves: dict[float, list[float]] = {}
for rate, checks in zip(chosen.learning_rates, futures, strict=True):
    curves[rate] = [each.result().metrics["loss:sum"] / held_out_tokens for each in checks]
    print(f"learning rate {rate:g}: held-out loss", " ".join(f"{loss:.3f}" for loss in curves[rate]))
print(f"{len(clients)} runs of {chosen.steps} steps in {time.monotonic() - began:.1f} s")

# %% [markdown]
# ## The best one

# %%
final = {rate: losses[-1] if math.isfinite(losses[-1]) else math.inf for rate, losses in curves.items()}
best = min(final, key=final.__getitem__)
print(f"the best learning rate is {best:g}: {final[best]:.3f}")

plot("held-out loss", "step", {f"{rate:g}": losses for rate, losses in curves.items()})
plot("held-out loss at the end", "learning rate", {"loss": list(final.values())}, at=list(final))
service.close("success").result()
