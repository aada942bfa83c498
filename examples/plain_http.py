# %% [markdown]
# # Plain HTTP
#
# Everything that the SDK does is JSON over HTTP. This trains an adapter and samples from it with `httpx` alone; any
# language with an HTTP client can do the same. [docs/http.md](../docs/http.md) explains each request.

# %%
import httpx
from common import options, plot

chosen = options("Training over plain HTTP.", steps=8, learning_rate=1e-3, rank=8)
url = (chosen.base_url or "http://127.0.0.1:8410").rstrip("/")
http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": chosen.api_key or ""}, timeout=60)


# %% [markdown]
# ## Submit, then poll
#
# Expensive requests answer at once with a `request_id`. `retrieve_future` waits for up to 30 seconds; 408 with
# `try_again` means: not yet.


# %%
def post(route: str, **body):
    answer = http.post(route, json=body)
    if answer.is_error and answer.status_code != 408:
        raise SystemExit(f"{route}: {answer.json()['detail']}")
    return answer.json() if answer.content else None


def result(route: str, **body):
    """Submit and wait for the result."""
    promise = post(route, **body)
    while True:
        answer = post("retrieve_future", request_id=promise["request_id"])
        if answer.get("type") == "try_again":
            continue
        if "error" in answer:
            raise SystemExit(f"{route}: {answer['error']}")
        return answer


# %% [markdown]
# ## A session, a run, and training steps
#
# `seq_id` orders the requests of a run and makes them safe to repeat: the same request under the same number is never
# executed twice. Token ids are the model's own; here they only have to exist.

# %%
session = post("create_session", tags=["plain-http"], user_metadata={}, sdk_version="httpx")["session_id"]
run = result(
    "create_model",
    session_id=session,
    model_seq_id=0,
    base_model=chosen.model,
    lora_config={"rank": chosen.rank, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True},
)["model_id"]
print("run", run)

tokens = [104, 99, 106, 42, 57, 81, 99, 106, 60, 61, 62]
datum = {
    "model_input": tokens[:-1],
    "loss_fn_inputs": {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
}
losses: list[float] = []
seq_id = 0
for step in range(chosen.steps):
    gradient = result("forward_backward", model_id=run, seq_id=seq_id + 1, loss_fn="cross_entropy", data=[datum])
    result("optim_step", model_id=run, seq_id=seq_id + 2, adam_params={"lr": chosen.learning_rate})
    seq_id += 2
    losses.append(gradient["metrics"]["loss:sum"])
    print(f"step {step}: loss {losses[-1]:.3f}")

plot("cross-entropy", "step", {"loss": losses})

# %% [markdown]
# ## Save, and sample

# %%
weights = result("save_weights_for_sampler", model_id=run, seq_id=seq_id + 1, path="plain-http")["path"]
sampler = post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=weights)
drawn = result(
    "asample",
    sampling_session_id=sampler["sampling_session_id"],
    seq_id=0,
    num_samples=1,
    prompt={"chunks": [{"type": "encoded_text", "tokens": tokens[:5]}]},
    sampling_params={"max_tokens": len(tokens) - 5, "temperature": 0},
)["sequences"][0]["tokens"]
print("it should continue", tokens[5:], "and does", drawn)

post(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
http.close()
