"""What two clients do on a server that dies under them: together they come to every numbered place.

Each returns what it has in the end, in a form that is the same however often the server died. One is the unmodified
SDK; the other speaks plain HTTP, for what the SDK does not say.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyrage
from tinker import types

from tests.fault.harness import CLIENT_SECONDS, MODEL, RAW_DATA, STATE, Raw, Service, sdk, train

OPTIONS = ("--snapshot-operations", "4", "--snapshot-share", "1", "--sweep-interval", "0.5")
KINDS = (
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "zero_grad",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "unload_model",
    "sample",
)
"""Every kind of operation that runs on a worker."""
HUGE = [{**RAW_DATA[0], "loss_fn_inputs": {**RAW_DATA[0]["loss_fn_inputs"], "weights": [3e38] * 4}}]  # type: ignore[dict-item]


def together(service: Service, steps: int = 4) -> dict[str, object]:
    """Both clients at once; what they have in the end."""
    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(program, service, steps) for program in (sdk_program, raw_program)]
        return {name: value for client in clients for name, value in client.result(CLIENT_SECONDS).items()}


def sdk_program(service: Service, steps: int) -> dict[str, object]:
    """Train, go back to a checkpoint, train on, sample from an ephemeral and a named sampler, save."""
    client = sdk(service)
    training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=3).result()
    train(training, steps)
    middle = training.save_state("middle").result(timeout=CLIENT_SECONDS).path
    train(training, 1)
    training.load_state(middle).result(timeout=CLIENT_SECONDS)
    train(training, steps)
    ephemeral = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("named").result(timeout=CLIENT_SECONDS).path
    named = client.create_sampling_client(model_path=path).result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=5)
    drawn = [
        sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, params).result(timeout=CLIENT_SECONDS)
        for sampler in (ephemeral, named)
    ]
    final = training.save_state("final").result(timeout=CLIENT_SECONDS).path
    client.close("success").result(timeout=CLIENT_SECONDS)
    model_id = final.removeprefix("tinker://").split("/")[0]
    session_id = model_id.split(":")[0]
    wait_for(lambda: service.rows("SELECT 1 FROM checkpoints WHERE model_id = ? AND name IS NULL", model_id) == [])
    return {
        "middle": service.saved(middle),
        "final": service.saved(final),
        "drawn": [list(sequence.tokens) for result in drawn for sequence in result.sequences],
        "outcomes": service.outcomes(model_id),
        "tokens": service.tokens(session_id),
        "state of the run": service.rows("SELECT state FROM runs WHERE model_id = ?", model_id),
        "samples": service.rows(
            f"SELECT seq_id, {STATE} FROM operations WHERE scope LIKE ? ORDER BY scope, seq_id",
            f"sampler:{session_id}:sample:%",
        ),
    }


def raw_program(service: Service, steps: int) -> dict[str, object]:
    """Clear gradients, be refused, fail, overwrite, copy, export, delete, unload, finish."""
    raw = Raw(service)
    session = raw.call("POST", "create_session", sdk_version="test")["session_id"]
    lora = {"rank": 4, "seed": 9}
    created = raw.do("create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config=lora)
    model: str = created["model_id"]
    numbers = iter(range(1, 1000))

    def asked(**body: Any) -> dict[str, Any]:
        return {"model_id": model, "seq_id": next(numbers), **body}

    def batch(data: Any = RAW_DATA) -> dict[str, Any]:
        return asked(data=data, loss_fn="cross_entropy")

    for step in range(steps):
        raw.do("forward_backward", **batch())
        raw.do("zero_grad", **asked())
        raw.do("forward_backward", **batch())
        raw.do("optim_step", **asked(adam_params={"learning_rate": 0.01 / (1 + step)}))
    codes = [raw.refused("forward_backward", **asked(data=RAW_DATA, loss_fn="no_such_loss"))]
    raw.do("forward_backward", **batch(HUGE))
    codes.append(raw.fails("optim_step", **asked(adam_params={"learning_rate": 0.01})))
    first = raw.do("save_weights", **asked(path="raw"))["path"]
    raw.do("forward_backward", **batch())
    raw.do("optim_step", **asked(adam_params={"learning_rate": 0.01}))
    kept = raw.do("save_weights", **asked(path="raw", overwrite=True))["path"]
    assert kept == first
    scores = raw.do("forward", **batch())["loss_fn_outputs"][0]["logprobs"]["data"]
    target = {"source_path": kept, "session_id": session, "model_seq_id": 1}
    copied = raw.call("POST", "copy_weights", **target)["tinker_path"]
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    raw.do("save_weights_external", **asked(path="sealed", age_encryption_recipients=[recipient]))
    raw.do("save_weights", **asked(path="gone"))
    raw.delete(f"training_runs/{model}/checkpoints/weights/gone")
    raw.do("unload_model", model_id=model)
    raw.call("POST", f"sessions/{session}/finish", reason={"type": "success"})
    return {
        "raw": service.saved(kept),
        "copy": service.saved(copied),
        "codes": codes,
        "scores": scores,
        "raw outcomes": service.outcomes(model),
        "raw tokens": service.tokens(session),
        "checkpoints": service.rows(
            "SELECT kind, name, has_optimizer, encrypted FROM checkpoints WHERE model_id LIKE ? ORDER BY 1, 2",
            f"{session}:%",
        ),
        "runs": service.rows("SELECT model_seq_id, state FROM runs WHERE session_id = ? ORDER BY 1", session),
    }


def wait_for(true: Any, seconds: float = CLIENT_SECONDS) -> None:
    """Wait until a condition of the database holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)
