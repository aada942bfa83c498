"""One training step with the generated Python client: `training_step.py URL KEY MODEL`; prints its numbers as JSON."""

from __future__ import annotations

import json
import sys
from typing import TypeVar

from httpx import Timeout
from tinsmith_client import AuthenticatedClient
from tinsmith_client.api.futures import retrieve_future
from tinsmith_client.api.sampling import asample, create_sampling_session
from tinsmith_client.api.sessions import create_session
from tinsmith_client.api.training import create_model, forward_backward, optim_step
from tinsmith_client.models import (
    AdamParams,
    CreateModelRequest,
    CreateModelResult,
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    Datum,
    DatumLossFnInputs,
    ErrorResponse,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    LoraConfig,
    OptimStepRequest,
    OptimStepResult,
    OptimStepResultMetricsType0,
    RetrieveFutureRequest,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TryAgain,
    UntypedPromise,
)

TOKENS: list[int] = [72, 101, 108, 108, 111]
TARGETS: list[float | list[float]] = [101, 108, 108, 111, 33]

T = TypeVar("T")


def expect(kind: type[T], answer: object) -> T:
    """The answer, if it is of that kind."""
    if not isinstance(answer, kind):
        raise TypeError(f"{kind.__name__} was due, not {answer!r}")
    return answer


def wait_for(client: AuthenticatedClient, kind: type[T], promise: object) -> T:
    """The result behind a promise, which is of that kind and of no other."""
    request_id = expect(UntypedPromise, promise).request_id
    while True:
        answer = retrieve_future.sync(client=client, body=RetrieveFutureRequest(request_id=request_id))
        if not isinstance(answer, TryAgain):
            return expect(kind, answer)


def datum() -> Datum:
    """One example."""
    inputs = DatumLossFnInputs()
    inputs["target_tokens"] = TARGETS
    inputs["weights"] = [1.0] * len(TARGETS)
    return Datum(model_input=TOKENS, loss_fn_inputs=inputs)


def main(url: str, key: str, base_model: str) -> dict[str, object]:
    """Train one step, then sample; returns what the other client must report too."""
    client = AuthenticatedClient(base_url=url, token=key, prefix="", auth_header_name="X-API-Key", timeout=Timeout(60))
    opened = create_session.sync(client=client, body=CreateSessionRequest(tags=["generated-python"]))
    session = expect(CreateSessionResponse, opened).session_id
    lora = LoraConfig(rank=4, seed=7)
    wanted = CreateModelRequest(session_id=session, model_seq_id=0, base_model=base_model, lora_config=lora)
    model = wait_for(client, CreateModelResult, create_model.sync(client=client, body=wanted)).model_id

    batch = ForwardBackwardRequest(model_id=model, seq_id=1, data=[datum()], loss_fn="no_such_loss")
    refused = expect(ErrorResponse, forward_backward.sync(client=client, body=batch))
    batch.loss_fn = "cross_entropy"
    trained = wait_for(client, ForwardBackwardOutput, forward_backward.sync(client=client, body=batch))

    step = OptimStepRequest(model_id=model, seq_id=2, adam_params=AdamParams(learning_rate=1e-3))
    stepped = wait_for(client, OptimStepResult, optim_step.sync(client=client, body=step))
    metrics = expect(OptimStepResultMetricsType0, stepped.metrics)

    asked = CreateSamplingSessionRequest(session_id=session, sampling_session_seq_id=0, base_model=base_model)
    sampler = expect(CreateSamplingSessionResponse, create_sampling_session.sync(client=client, body=asked))
    sample = SampleRequest(
        sampling_session_id=sampler.sampling_session_id,
        prompt=TOKENS,
        sampling_params=SamplingParams(max_tokens=6, temperature=0.0, stop=[]),
    )
    sampled = wait_for(client, SampleResponse, asample.sync(client=client, body=sample))
    return {
        "refused": refused.error.field,
        "loss": trained.metrics["loss:sum"],
        "logprobs": trained.loss_fn_outputs[0]["logprobs"].data,
        "grad_norm": metrics["grad_norm"],
        "tokens": sampled.sequences[0].tokens,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:4])) + "\n")
