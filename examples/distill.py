# %% [markdown]
# # On-policy distillation
#
# A student learns from a teacher on the student's own samples: the student writes, the teacher says how likely each
# token would have been from its own pen, and the student moves towards that. The quantity to bring down is the KL
# divergence
#
#     KL(student, teacher) = mean over the student's samples of (student's logprob - teacher's logprob).

# %%
import statistics

from common import answer_ids, ask, connect, options, plot, shifted
from tinker import types

chosen = options(
    "On-policy distillation.",
    teacher_steps=6,
    steps=6,
    group=4,
    max_tokens=16,
    learning_rate=1e-3,
    rank=16,
)

# %% [markdown]
# ## A teacher
#
# Any sampling client can teach: a larger model with the same tokens, a checkpoint, a vLLM server. Here a few supervised
# steps make one. Another run of the same session trains it, so both share the base model on the server.

# %%
QUESTIONS = ["What is tin?", "What is a lamp?", "What is a rivet?", "What is a hammer?"]
MANNER = "By my anvil, a thing of use!"

service = connect(chosen)
trainer = service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1).result()
tokenizer = trainer.get_tokenizer()
prompts = [ask(tokenizer, question) for question in QUESTIONS]
manner = answer_ids(tokenizer, MANNER)
lessons = [shifted(prompt, manner, weights=[1] * len(manner)) for prompt in prompts]
adam = types.AdamParams(learning_rate=chosen.learning_rate)
for _ in range(chosen.teacher_steps):
    trainer.forward_backward(lessons, loss_fn="cross_entropy")
    trainer.optim_step(adam).result()
teacher = trainer.save_weights_and_get_sampling_client().result()

# %% [markdown]
# ## The loop
#
# `compute_logprobs` scores the teacher's opinion of each sample in one pass. The difference is the advantage of each
# token: what the teacher likes better than the student does is made likelier. `importance_sampling` needs nothing
# else.

# %%
student = service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=2).result()
divergences: list[float] = []
for step in range(chosen.steps):
    sampler = student.save_weights_and_get_sampling_client().result()
    drawn = []
    for number, prompt in enumerate(prompts):
        params = types.SamplingParams(max_tokens=chosen.max_tokens, temperature=1.0, seed=100 * step + number)
        future = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=chosen.group, sampling_params=params)
        drawn.append((prompt, future))
    written = [(prompt, each) for prompt, future in drawn for each in future.result().sequences]
    opinions = [
        teacher.compute_logprobs(types.ModelInput.from_ints([*prompt, *each.tokens])) for prompt, each in written
    ]

    data: list[types.Datum] = []
    gaps: list[float] = []
    for (prompt, each), opinion in zip(written, opinions, strict=True):
        of_teacher = opinion.result()[len(prompt) :]
        gap = [mine - theirs for mine, theirs in zip(each.logprobs, of_teacher, strict=True)]
        gaps += gap
        data.append(shifted(prompt, each.tokens, logprobs=each.logprobs, advantages=[-value for value in gap]))
    divergences.append(statistics.mean(gaps))
    print(f"step {step}: KL to the teacher {divergences[-1]:.3f} nats per token")
    gradient = student.forward_backward(data, loss_fn="importance_sampling")
    update = student.optim_step(adam)
    gradient.result()
    update.result()

# %%
plot("KL(student, teacher), nats per token", "step", {"KL": divergences})
service.close("success").result()
