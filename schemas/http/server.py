"""Bodies about the server itself: client configuration, capabilities, health, telemetry, errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.errors import Category
from schemas.http.base import Identifier, Items, Label, RequestModel, ResponseModel


class ClientConfigRequest(RequestModel):
    """Body of `client/config` and `client/dynamic_config`."""

    sdk_version: Label | None = Field(None, description="Version of the client.")


class ClientConfigResponse(ResponseModel):
    """Flags that the SDK reads once per client. No field may be null: that fails the construction of the client."""

    pjwt_auth_enabled: bool = Field(False, description="Exchange the key for a JWT first.")
    parallel_fwdbwd_chunks: bool = Field(True, description="Send the chunks of one call concurrently.")
    proto_compress_fwdbwd: bool = Field(True, description="Send forward_backward bodies as zstd.")
    fwdbwd_max_chunk_len: int = Field(1024, ge=1, description="Most datums in one request.")
    fwdbwd_max_chunk_bytes_count: int = Field(5_000_000, ge=1, description="Most (estimated) bytes in one request.")
    billing_exception_max_pause_duration_sec: int = Field(0, ge=0, description="How long to wait out a 402.")
    sample_no_retries: bool = Field(False, description="Do not resubmit samples that failed to arrive.")
    sample_max_concurrent_requests: int = Field(2000, ge=1, description="Most outstanding samples of one client.")
    sample_use_retrieve_futures: bool = Field(False, description="Poll sample results in batches.")
    custom_loss_server_side: bool = Field(False, description="Upload custom losses instead of running them locally.")
    sample_join_sampling_session: bool = Field(False, description="Ask the server for the id of a cloned client.")


class ClientDynamicConfigResponse(ResponseModel):
    """Flags that the SDK reads again and again."""

    refresh_interval_sec: int = Field(300, ge=10, description="Seconds between two readings.")
    sample_cancel_enabled: bool = Field(False, description="Tell the server about abandoned samples.")
    sample_cancel_max_batch_size: int = Field(64, ge=1, description="Parallel cancellations.")


class SupportedModel(ResponseModel):
    """A base model of this server."""

    model_name: str = Field(description="The name to give as base_model.")
    max_context_length: int | None = Field(None, description="Most tokens of prompt and answer together.")
    trainable: bool = Field(description="Whether adapters can be trained on it now.")
    sampleable: bool = Field(description="Whether it can be sampled now.")


class EngineCapabilities(ResponseModel):
    """What the engine can do that computes every base model of this server."""

    name: str = Field(description="The engine.")
    devices: list[str] = Field(description="Kinds of devices that it computes on.")
    several_ranks: bool = Field(description="Whether several processes may compute one base model.")
    many_adapters: bool = Field(description="Whether datums of different training runs share a pass.")
    packed: bool = Field(description="Whether datums share a row of a pass, where model and machine allow it.")
    tensor_parallel: bool = Field(description="Whether single weights can be split over ranks.")
    pipeline_parallel: bool = Field(description="Whether layers can be split over ranks.")
    optimizers: list[str] = Field(description="What optimizer_config.type may be.")
    modalities: list[str] = Field(description="What datums and prompts may hold.")
    samplers: list[str] = Field(description="Samplers that can run beside it.")


class ServerCapabilitiesResponse(ResponseModel):
    """Result of `get_server_capabilities`."""

    supported_models: list[SupportedModel] = Field(description="Every base model that this server was started with.")
    engine: EngineCapabilities = Field(description="What computes them. Not in the hosted service's answer.")
    server_version: str = Field(description="Version of this server. Not in the hosted service's answer.")
    notes: list[str] = Field(description="Where this server, for good reasons, is not the hosted service.")


class TelemetryRequest(RequestModel):
    """A batch of client events. Events are free objects: they are counted, never stored, for they may hold secrets."""

    events: Annotated[Items[dict[str, Any]], Field(max_length=1000)] = Field(description="The events.")
    platform: str = Field("", max_length=256, description="Name of the client's operating system.")
    sdk_version: str = Field("", max_length=256, description="Version of the client.")
    session_id: Identifier = Field(description="A session, or `sessionless-{uuid}`.")
    process_uuid: str = Field("", max_length=256, description="Identity of the client's process.")


class TelemetryResponse(ResponseModel):
    """Result of `telemetry`."""

    status: Literal["accepted"] = Field("accepted", description="Always accepted.")


class HealthResponse(ResponseModel):
    """Result of `healthz`: the process answers."""

    status: Literal["ok"] = Field("ok", description="Always ok.")


ModelState = Literal["starting", "ready", "restarting", "failed"]


class ModelReadiness(ResponseModel):
    """Whether one base model can take work."""

    model_name: str = Field(description="The base model.")
    state: ModelState = Field(description="`ready` means that a worker has answered.")
    detail: str | None = Field(None, description="Why it is not ready, if it is not.")


class ReadyResponse(ResponseModel):
    """Result of `readyz` (503 unless `ready`)."""

    status: Literal["ready", "not_ready"] = Field(description="Whether every base model is ready.")
    models: list[ModelReadiness] = Field(description="Each base model.")


class MemoryNeeds(ResponseModel):
    """What a base model and its training take of the memory of their device, in bytes, as measured at start."""

    base: int = Field(description="Weights and buffers of the base model.")
    adapter: int = Field(description="A training run of rank 32 on every layer: weights, optimizer, gradients.")
    training_pass: int = Field(description="A forward and backward pass over one datum of 1,024 tokens.")
    training_pass_checkpointed: int = Field(description="The same with gradient checkpointing.")
    total: int = Field(description="Of the device, or what the worker may use of it.")
    free: int = Field(description="What of it was free when the base model was loaded.")


class WorkWaiting(ResponseModel):
    """What one base model has to do now, of all projects together."""

    training: int = Field(description="Accepted training operations that have not begun.")
    samples: int = Field(description="Accepted samples that have not begun.")
    adapters: int = Field(description="Live training runs, in memory or idle on disk.")


class ModelThroughput(ResponseModel):
    """What training on one base model has computed since the server started, of all projects together."""

    model_name: str = Field(description="The base model. Names of one folder share a worker and have the same numbers.")
    state: ModelState = Field(description="As in `readyz`.")
    tokens_per_second: float = Field(description="Tokens of datums per second, over the last minute.")
    tokens: int = Field(description="Tokens of the datums that were trained on or scored.")
    rows: int = Field(description="Tokens that were computed for them: the rest are padding.")
    padding_waste: float = Field(description="1 - tokens / rows, from 0 to 1.")
    sequences: int = Field(description="Datums.")
    passes: int = Field(description="Passes through the base model, each over many datums.")
    turns: int = Field(description="Calls of the worker, each with one pass or several and with optimizer steps.")
    steps: int = Field(description="Optimizer steps.")
    turn_tokens: int | None = Field(None, description="Tokens that fit into a turn; null until the model is loaded.")
    turn_fill: float = Field(description="Share of those that was used; above 1 if single datums are longer.")
    wall_seconds: float = Field(description="Seconds since the base model was loaded first.")
    busy_seconds: float = Field(description="Seconds of them in turns.")
    seconds: dict[str, float] = Field(description="Seconds of the turns by part: base, lora, head, optimizer.")
    flops: float = Field(description="Floating-point operations of the products with the base model.")
    peak_flops: float | None = Field(None, description="Most of them per second, measured at start; null = unknown.")
    mfu: float | None = Field(None, description="flops / (busy_seconds * peak_flops), from 0 to 1; null = unknown.")
    waiting: WorkWaiting = Field(description="What there is to do now.")
    memory: MemoryNeeds | None = Field(None, description="What training takes of the memory; null = unknown.")


class ThroughputResponse(ResponseModel):
    """Result of `throughput`."""

    models: list[ModelThroughput] = Field(description="Each base model.")


class ErrorInfo(ResponseModel):
    """The machine-readable part of an error."""

    code: str = Field(description="A stable identifier of the kind of error.")
    category: Category = Field(description="Whose fault it is.")
    field: str | None = Field(None, description="The request field at fault, dotted.")
    hint: str | None = Field(None, description="What to do next.")
    request_id: str | None = Field(None, description="Names this request in the server's log.")


class ErrorResponse(ResponseModel):
    """Body of every 4xx and 5xx."""

    detail: str = Field(description="One sentence that says what is wrong and what would be accepted.")
    error: ErrorInfo = Field(description="The same for programs.")
