# %% [markdown]
# # Direct preference optimization
#
# DPO needs no reward model and no samples: pairs of answers of which one is preferred are enough. Its loss
#
#     -log sigmoid(beta * ((chosen - chosen_ref) - (rejected - rejected_ref)))
#
# compares the log-probabilities of both answers with those of the model before training. It looks at two examples at
# once, so it is written here in PyTorch, on the client: `forward_backward_custom` fetches the logprobs,
# differentiates this function, and sends the derivative back as weights. The gradient is exact.

# %%
import torch
from common import answer_ids, ask, connect, options, plot, shifted
from tinker import types

chosen = options("Direct preference optimization.", steps=8, learning_rate=2e-4, rank=16, beta=0.1)

# %% [markdown]
# ## Pairs
#
# The same question, a friendly and a rude answer. Examples come in pairs: the chosen one, then the rejected one.

# %%
PAIRS = [
    ("Can you mend my lamp?", "Gladly! Bring it in.", "No. Buy a new one."),
    ("Is the kettle ready?", "It is, and it shines!", "Stop asking me."),
    ("How much is a rivet?", "A penny, and thank you!", "More than you have."),
    ("Are you open today?", "Yes, do come in!", "Read the sign."),
]

service = connect(chosen)
client = service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1).result()
tokenizer = client.get_tokenizer()

data: list[types.Datum] = []
for question, *answers in PAIRS:
    for answer in answers:
        ids = answer_ids(tokenizer, answer)
        data.append(shifted(ask(tokenizer, question), ids, weights=[1] * len(ids)))

# %% [markdown]
# ## The reference
#
# A fresh adapter changes nothing, so the reference is what this model says now. `forward` gives the logprob of every
# target; those of the answer are added up.

# %%
masks = [torch.tensor(datum.loss_fn_inputs["weights"].data) for datum in data]


def totals(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The log-probability of each answer, [examples]."""
    return torch.stack([(each * mask).sum() for each, mask in zip(logprobs, masks, strict=True)])


before = client.forward(data, loss_fn="cross_entropy").result().loss_fn_outputs
reference = totals([torch.tensor(output["logprobs"].data) for output in before])


def dpo(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    gain = totals(logprobs) - reference
    margin = chosen.beta * (gain[0::2] - gain[1::2])
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    return loss, {
        "dpo/loss": loss.item(),
        "dpo/margin": margin.mean().item(),
        "dpo/accuracy": (margin > 0).float().mean().item(),
    }


# %% [markdown]
# ## The loop
#
# The loss begins at log 2 = 0.693, where chosen and rejected are as likely as before. The margin should grow.

# %%
losses: list[float] = []
margins: list[float] = []
for step in range(chosen.steps):
    gradient = client.forward_backward_custom(data, dpo)
    update = client.optim_step(types.AdamParams(learning_rate=chosen.learning_rate))
    metrics = gradient.result().metrics
    update.result()
    losses.append(metrics["dpo/loss"])
    margins.append(metrics["dpo/margin"])
    print(f"step {step}: loss {losses[-1]:.3f}, margin {margins[-1]:.3f}, accuracy {metrics['dpo/accuracy']:.2f}")

plot("DPO", "step", {"loss": losses, "margin": margins})
service.close("success").result()
