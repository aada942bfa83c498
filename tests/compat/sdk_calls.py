"""One call of every public method of the SDK's clients, against running servers.

A class here for each client of the SDK, a method for each of its methods, under the same name: the docstring says what
is called, the return value what was found to hold. A method `x_async` of the SDK is called like `x` unless it has a
method of its own here. Responsible for the calls; `tests/compat/test_sdk_coverage.py` finds what must be called.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
import tinker
import torch
from tinker import types

MODEL = "acme/tiny"
TOKENS = ([5, 6, 7, 8, 9], [20, 21, 22])
ADAM = types.AdamParams(learning_rate=1e-2)
SECONDS = 60
HOUR = 3600
RANKS: dict[str, types.CustomLossInputRank] = {"logprobs": 1, "weights": 1}


def example(tokens: list[int]) -> types.Datum:
    """Each token predicts the next."""
    inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.ones(len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


DATA = [example(tokens) for tokens in TOKENS]
PROMPT = types.ModelInput.from_ints(TOKENS[0])


def settled(value: Any) -> Any:
    """What a call comes to: a coroutine is run, and a future (which a coroutine may return) waited for."""
    if inspect.iscoroutine(value):
        value = asyncio.run(asyncio.wait_for(_awaited(value), SECONDS))
    return value.result(SECONDS) if hasattr(value, "result") else value


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


@dataclass
class World:
    """One training client with a checkpoint of each type, and the clients around it."""

    url: str
    key: str
    identified_url: str
    identified_key: str
    names: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.service = tinker.ServiceClient(
            base_url=self.url, api_key=self.key, user_metadata={"purpose": "coverage"}, display_name="coverage"
        )
        self.rest, self.admin = [
            make(base_url=self.url, api_key=self.key) for make in (tinker.RestClient, tinker.AdminClient)
        ]
        self.client = settled(self.service.create_lora_training_client(base_model=MODEL, rank=4, seed=1))
        settled(self.client.forward_backward(DATA, "cross_entropy"))
        settled(self.client.optim_step(ADAM))
        self.session = self.client.model_id.split(":")[0]
        self.state = self.saved()
        self.scores = logprobs(self.client)
        self.weights = settled(self.client.save_weights_for_sampler(self.name())).path
        self.sampler = settled(self.service.create_sampling_client(model_path=self.weights))
        self.loss = settled(self.service.create_custom_loss(negative_log_likelihood, RANKS))
        [found] = settled(self.rest.search_sessions(types.SessionSearchRequest(session_id=self.session))).sessions
        self.project = found.project_id

    def name(self) -> str:
        """A name that no checkpoint has yet."""
        return f"checkpoint-{next(self.names)}"

    def saved(self) -> str:
        """The path of a new training checkpoint."""
        return str(settled(self.client.save_state(self.name())).path)

    def exported(self) -> str:
        """The path of new external weights."""
        return str(settled(self.client.save_weights_external(self.name(), ttl_seconds=HOUR)).path)

    def listed(self, path: str) -> Any:
        """A checkpoint as the run's list shows it, or None."""
        found = settled(self.rest.list_checkpoints(self.client.model_id)).checkpoints
        return next((each for each in found if each.tinker_path == path), None)


def logprobs(client: Any) -> list[list[float]]:
    """Of each example under a client's present weights."""
    output = settled(client.forward(DATA, "cross_entropy"))
    return [list(each["logprobs"].data) for each in output.loss_fn_outputs]


def same(found: list[float], wanted: list[float]) -> None:
    """Fails unless two lists of logprobs agree."""
    assert len(found) == len(wanted)
    assert all(abs(a - b) < 1e-3 for a, b in zip(found, wanted, strict=True)), (found, wanted)


def same_as_saved(world: World, client: Any) -> str:
    """Fails unless the client has the weights of the World's checkpoint."""
    for found, wanted in zip(logprobs(client), world.scores, strict=True):
        same(found, wanted)
    return "the logprobs are those at the time of saving"


Call = Callable[..., Any]
"""Calls the method under test with these arguments, on the World's client or on `target`, and settles it."""


class Common:
    """What all clients have."""

    def get_telemetry(self, world: World, call: Call) -> str:
        """no arguments"""
        assert type(call()).__name__ == "Telemetry"
        return "the telemetry of the client"

    def get_tokenizer(self, world: World, call: Call) -> str:
        """no arguments"""
        tokenizer = call()
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
        return "text survives encoding and decoding"


class ServiceClient(Common):
    def close(self, world: World, call: Call) -> str:
        """`"success"`, on a client of its own"""
        other = tinker.ServiceClient(base_url=world.url, api_key=world.key)
        session = other.holder.get_session_id()
        call("success", target=other)
        request = types.SessionSearchRequest(session_id=session)
        [found] = settled(world.rest.search_sessions(request)).sessions
        assert (found.status.type, found.status.reason.type) == ("client_finished", "success")
        return "the session is finished with that reason"

    def copy_weights(self, world: World, call: Call) -> str:
        """a training checkpoint, into the client's project"""
        mine = tinker.ServiceClient(base_url=world.url, api_key=world.key, project_id=world.project)
        return is_copy(world, call(world.state, target=mine))

    def create_custom_loss(self, world: World, call: Call) -> str:
        """a weighted negative log-likelihood"""
        with tinker.ServiceClient(base_url=world.url, api_key=world.key) as other:
            assert call(negative_log_likelihood, RANKS, target=other).name == "negative_log_likelihood"
        return "a handle of the loss"

    def create_lora_training_client(self, world: World, call: Call) -> str:
        """`rank=4, seed=1`"""
        assert call(MODEL, rank=4, seed=1).get_info().lora_rank == 4
        return "a client whose model has that rank"

    def create_rest_client(self, world: World, call: Call) -> str:
        """no arguments"""
        assert settled(call().list_sessions()).sessions
        return "a client that lists sessions"

    def create_sampling_client(self, world: World, call: Call) -> str:
        """`model_path=` of sampler weights"""
        sampler = call(model_path=world.weights)
        same(settled(sampler.compute_logprobs(PROMPT))[1:], world.scores[0])
        return "samples from the saved weights"

    def create_training_client_from_state(self, world: World, call: Call) -> str:
        """a training checkpoint"""
        return same_as_saved(world, call(world.state))

    def create_training_client_from_state_with_optimizer(self, world: World, call: Call) -> str:
        """a training checkpoint"""
        return same_as_saved(world, call(world.state))

    def get_console_url(self, world: World, call: Call) -> str:
        """no arguments"""
        assert world.session in call()
        return "an address of the hosted console with the session's id; made by the SDK itself"

    def get_server_capabilities(self, world: World, call: Call) -> str:
        """no arguments"""
        assert [each.model_name for each in call().supported_models] == [MODEL]
        return "the served base models"


def is_copy(world: World, path: str) -> str:
    """Fails unless the path is another one with the same weights."""
    assert path != world.state
    assert settled(world.rest.get_weights_info_by_tinker_path(path)).lora_rank == 4
    return same_as_saved(world, settled(world.service.create_training_client_from_state(path)))


def negative_log_likelihood(logprobs: Any, weights: Any) -> Any:
    """cross_entropy, as a loss that the SDK can trace."""
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


class TrainingClient(Common):
    def create_sampling_client(self, world: World, call: Call) -> str:
        """sampler weights of this model"""
        same(settled(call(world.weights).compute_logprobs(PROMPT))[1:], world.scores[0])
        return "samples from the saved weights"

    def forward(self, world: World, call: Call) -> str:
        """two examples, `cross_entropy`"""
        output = call(DATA, "cross_entropy")
        assert [len(each["logprobs"].data) for each in output.loss_fn_outputs] == [4, 2]
        return "a logprob for each token, `loss:sum`"

    def forward_backward(self, world: World, call: Call) -> str:
        """two examples, `cross_entropy`"""
        output = call(DATA, "cross_entropy")
        total = sum(sum(each["logprobs"].data) for each in output.loss_fn_outputs)
        assert math.isclose(output.metrics["loss:sum"], -total, rel_tol=1e-4)
        return "`loss:sum` is minus the sum of the logprobs"

    def forward_backward_custom(self, world: World, call: Call) -> str:
        """two examples and a handle of `create_custom_loss`; then a Python function"""
        metrics = call(DATA, world.loss).metrics
        assert math.isclose(metrics["custom/nll:sum"], metrics["loss:sum"], rel_tol=1e-4)
        metrics = call(DATA, lambda data, scores: (-sum(each.sum() for each in scores), {"n": 2.0})).metrics
        assert metrics["n"] == 2.0
        return "the metrics of the loss"

    def get_console_url(self, world: World, call: Call) -> str:
        """no arguments"""
        assert world.session in call()
        return "an address of the hosted console; made by the SDK itself"

    def get_info(self, world: World, call: Call) -> str:
        """no arguments"""
        info = call()
        assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (MODEL, 4, True)
        return "base model and rank"

    def load_state(self, world: World, call: Call) -> str:
        """a training checkpoint"""
        call(world.state)
        return same_as_saved(world, world.client)

    def load_state_with_optimizer(self, world: World, call: Call) -> str:
        """a training checkpoint"""
        call(world.state)
        return same_as_saved(world, world.client)

    def optim_step(self, world: World, call: Call) -> str:
        """AdamW, after a `forward_backward`; on a client of its own"""
        other = settled(world.service.create_lora_training_client(base_model=MODEL, rank=4, seed=1))
        settled(other.forward_backward(DATA, "cross_entropy"))
        before = sum(map(sum, logprobs(other)))
        assert call(ADAM, target=other).metrics["grad_norm"] > 0
        assert sum(map(sum, logprobs(other))) > before
        return "the examples are more likely than before; `grad_norm`"

    def save_state(self, world: World, call: Call) -> str:
        """a name, `ttl_seconds=3600`, user metadata"""
        path = call(world.name(), ttl_seconds=HOUR, user_metadata={"step": "1"}).path
        assert world.listed(path).user_metadata == {"step": "1"}
        assert world.listed(path).expires_at is not None
        return "a training checkpoint with that metadata, which expires"

    def save_weights_and_get_sampling_client(self, world: World, call: Call) -> str:
        """`kind="snapshot"`, then `kind="inflight"`"""
        settled(world.client.load_state(world.state))
        for kind in ("snapshot", "inflight"):
            same(settled(call(kind=kind).compute_logprobs(PROMPT))[1:], world.scores[0])
        return "samples from the present weights"

    def save_weights_external(self, world: World, call: Call) -> str:
        """a name, `ttl_seconds=3600`"""
        path = call(world.name(), ttl_seconds=HOUR).path
        assert world.listed(path).checkpoint_type == "external"
        return "an external checkpoint"

    def save_weights_for_sampler(self, world: World, call: Call) -> str:
        """a name, `ttl_seconds=3600`"""
        path = call(world.name(), ttl_seconds=HOUR).path
        assert world.listed(path).checkpoint_type == "sampler"
        return "a sampler checkpoint"


class SamplingClient(Common):
    def compute_logprobs(self, world: World, call: Call) -> str:
        """a prompt of five tokens"""
        found = call(PROMPT)
        assert found[0] is None
        same(found[1:], world.scores[0])
        return "the logprobs that training reports"

    def create(self, world: World, call: Call) -> str:
        """a base model"""
        assert call(world.service.holder, base_model=MODEL).get_base_model() == MODEL
        return "a client of the base model"

    def from_sampler_handle(self, world: World, call: Call) -> str:
        """a handle of `get_sampler_handle`"""
        found = settled(call(world.sampler.get_sampler_handle(), api_key=world.key).compute_logprobs(PROMPT))
        same(found[1:], world.scores[0])
        return "samples from the same weights"

    def get_base_model(self, world: World, call: Call) -> str:
        """no arguments"""
        assert call() == MODEL
        return "the name of the base model"

    def get_sampler_handle(self, world: World, call: Call) -> str:
        """no arguments"""
        assert world.key not in call()
        return "a handle without the key"

    def on_queue_state_change(self, world: World, call: Call) -> str:
        """a paused state, as the poller reports it"""
        from tinker.lib.api_future_impl import QueueState

        assert call(QueueState.PAUSED_CAPACITY, "the base model is loading") is None
        return "logged by the SDK"

    def sample(self, world: World, call: Call) -> str:
        """two sequences of three tokens, with every kind of logprob that can be asked for"""
        targets = types.TensorData.from_torch(torch.tensor([[token] for token in TOKENS[0][1:]]))
        result = call(
            PROMPT,
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=3, stop=[]),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=2,
            target_prompt_logprobs=targets,
            prompt_alt_tokens_k=1,
        )
        assert [len(each.tokens) for each in result.sequences] == [3, 3]
        assert [len(each.logprobs) for each in result.sequences] == [3, 3]
        same(result.prompt_logprobs[1:], world.scores[0])
        assert result.topk_prompt_logprobs is not None
        assert result.target_prompt_logprobs is not None
        return "tokens and logprobs of both; the prompt's logprobs are those of training"


class Admin(Common):
    """What both the administration and the REST client have."""

    def get_audit_log(self, world: World, call: Call) -> str:
        """`"checkpoints"`"""
        entries = call("checkpoints").entries
        assert world.state in [entry.tinker_path for entry in entries if entry.event == "checkpoint_created"]
        return "who made which checkpoint"

    def get_billing_usage(self, world: World, call: Call) -> str:
        """the last three hours"""
        end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        rows = call(end - timedelta(hours=3), end).data
        assert {"training", "sampling_prefill", "checkpoint"} <= {row.event_info.type for row in rows}
        return "tokens trained and sampled, checkpoints, by the hour"

    def get_current_checkpoint_storage_usage(self, world: World, call: Call) -> str:
        """no arguments"""
        assert call().data[0].size_bytes > 0
        return "number and size of the checkpoints"


class AdminClient(Admin):
    pass


class RestClient(Admin):
    def assign_session_project(self, world: World, call: Call) -> str:
        """the session and its own project"""
        assert call(world.session, world.project) is None
        with pytest.raises(tinker.NotFoundError):
            call(world.session, "another")
        return "accepted; another project is refused"

    def copy_weights(self, world: World, call: Call) -> str:
        """a training checkpoint, into this project"""
        return is_copy(world, call(world.state, world.project))

    def delete_checkpoint(self, world: World, call: Call) -> str:
        """run and checkpoint id"""
        path = world.saved()
        call(world.client.model_id, path.split("/", 3)[3])
        assert world.listed(path) is None
        return "the checkpoint is gone from the list"

    def delete_checkpoint_from_tinker_path(self, world: World, call: Call) -> str:
        """a path"""
        path = world.saved()
        call(path)
        assert world.listed(path) is None
        return "the checkpoint is gone from the list"

    def export_session_trace(self, world: World, call: Call) -> str:
        """a session"""
        with urllib.request.urlopen(call(world.session), timeout=SECONDS) as answer:
            assert json.load(answer)["traceEvents"]
        return "an address of a trace with its operations"

    def get_external_weights_urls(self, world: World, call: Call) -> str:
        """external weights"""
        urls = call(world.exported()).urls
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
        with urllib.request.urlopen(urls["adapter_config.json"], timeout=SECONDS) as answer:
            assert json.load(answer)["r"] == 4
        return "addresses of the files of a PEFT adapter, which open without a key"

    def get_sampler(self, world: World, call: Call) -> str:
        """a sampling session"""
        found = call(world.sampler._sampling_session_id)
        assert (found.base_model, found.model_path) == (MODEL, world.weights)
        return "base model and path"

    def get_server_capabilities(self, world: World, call: Call) -> str:
        """no arguments"""
        assert [each.model_name for each in call().supported_models] == [MODEL]
        return "the served base models"

    def get_session(self, world: World, call: Call) -> str:
        """a session"""
        assert world.client.model_id in call(world.session).training_run_ids
        return "its runs and samplers"

    def get_training_run(self, world: World, call: Call) -> str:
        """a run"""
        assert call(world.client.model_id).last_checkpoint is not None
        return "base model, rank, last checkpoints"

    def get_training_run_by_tinker_path(self, world: World, call: Call) -> str:
        """a path"""
        assert call(world.state).training_run_id == world.client.model_id
        return "the run that made the checkpoint"

    def get_weights_info_by_tinker_path(self, world: World, call: Call) -> str:
        """a path"""
        info = call(world.state)
        assert (info.base_model, info.lora_rank, info.train_mlp) == (MODEL, 4, True)
        return "base model, rank, what is trained"

    def list_checkpoints(self, world: World, call: Call) -> str:
        """a run"""
        found = {each.tinker_path for each in call(world.client.model_id).checkpoints}
        assert {world.state, world.weights} <= found
        return "its checkpoints"

    def list_sessions(self, world: World, call: Call) -> str:
        """`limit=100`"""
        assert world.session in call(limit=100).sessions
        return "the project's sessions"

    def list_training_runs(self, world: World, call: Call) -> str:
        """`limit=100`"""
        assert world.client.model_id in [run.training_run_id for run in call(limit=100).training_runs]
        return "the project's runs"

    def list_user_checkpoints(self, world: World, call: Call) -> str:
        """`limit=100`"""
        assert world.state in [each.tinker_path for each in call(limit=100).checkpoints]
        return "the project's checkpoints"

    def publish_checkpoint_from_tinker_path(self, world: World, call: Call) -> str:
        """a path"""
        path = world.saved()
        call(path)
        assert world.listed(path).public
        return "the checkpoint is public"

    def search_sessions(self, world: World, call: Call) -> str:
        """by user metadata and name"""
        request = types.SessionSearchRequest(user_metadata={"purpose": "coverage"}, display_name="coverage")
        assert [each.session_id for each in call(request).sessions] == [world.session]
        return "the one session that has them"

    def set_checkpoint_ttl_from_tinker_path(self, world: World, call: Call) -> str:
        """`3600`, then `None`"""
        path = world.saved()
        call(path, HOUR)
        assert world.listed(path).expires_at is not None
        call(path, None)
        assert world.listed(path).expires_at is None
        return "the checkpoint expires, then no longer"

    def unpublish_checkpoint_from_tinker_path(self, world: World, call: Call) -> str:
        """a public checkpoint"""
        path = world.saved()
        settled(world.rest.publish_checkpoint_from_tinker_path(path))
        call(path)
        assert not world.listed(path).public
        return "the checkpoint is private again"

    def whoami(self, world: World, call: Call) -> str:
        """no arguments, on a server with `pjwt_auth_enabled`, because the SDK reads its token"""
        other = tinker.RestClient(base_url=world.identified_url, api_key=world.identified_key)
        assert call(target=other).user_urn.startswith("tml:user:")
        return "the project behind the key"
