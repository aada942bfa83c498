"""Bodies of weights: saving, loading, checkpoints and training runs as the REST part lists them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from schemas.http.base import (
    SEQ_ID_TEXT,
    Identifier,
    Label,
    Name,
    RequestModel,
    ResponseModel,
    SeqId,
    SessionCounter,
    TinkerPath,
    TtlSeconds,
    UserMetadata,
)
from schemas.http.models import OptimizerConfig, OptimizerConfigResult
from schemas.http.run_metrics import RunMetricsSummary, RunStateName

_TTL_TEXT = "Deleted after so many seconds, 3600 to ten years; absent = kept."


class SaveWeightsRequest(RequestModel):
    """Body of `save_weights`: a training checkpoint (adapter and optimizer state)."""

    model_id: Identifier = Field(description="The model.")
    seq_id: SeqId | None = Field(None, description=SEQ_ID_TEXT)
    path: Name = Field(description="Name of the checkpoint.")
    ttl_seconds: TtlSeconds | None = Field(None, description=_TTL_TEXT)
    overwrite: bool = Field(False, description="Replace a checkpoint of this name, its metadata included.")
    user_metadata: UserMetadata | None = Field(None, description="Free pairs of text.")
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResult(ResponseModel):
    """Result of `save_weights`."""

    path: str = Field(description="The checkpoint, tinker://{model_id}/weights/{name}.")
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(RequestModel):
    """Body of `save_weights_for_sampler`: named (with `path`), or ephemeral (with `sampling_session_seq_id`), which
    opens a sampling session on the weights at once."""

    model_id: Identifier = Field(description="The model.")
    seq_id: SeqId | None = Field(None, description=SEQ_ID_TEXT)
    path: Name | None = Field(None, description="Name of the checkpoint (named form).")
    sampling_session_seq_id: SessionCounter | None = Field(
        None, description="Counts the sampling sessions of the session, from 0 (ephemeral form)."
    )
    kind: Literal["snapshot", "inflight"] = Field(
        "snapshot",
        description="`inflight`: the sampling session follows the newest inflight save of the model, and so do those "
        "that earlier inflight saves opened (ephemeral form only).",
    )
    ttl_seconds: TtlSeconds | None = Field(None, description=_TTL_TEXT)
    user_metadata: UserMetadata | None = Field(None, description="Free pairs of text.")
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @model_validator(mode="after")
    def _one_form(self) -> SaveWeightsForSamplerRequest:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path (a named checkpoint) or sampling_session_seq_id (an ephemeral one)")
        if self.path is None and (self.ttl_seconds is not None or self.user_metadata is not None):
            raise ValueError("ttl_seconds and user_metadata belong to a named checkpoint: give path with them")
        if self.path is not None and self.kind == "inflight":
            raise ValueError("kind is 'inflight', but a named checkpoint never changes: leave path out, or kind")
        return self


class SaveWeightsForSamplerResult(ResponseModel):
    """Result of `save_weights_for_sampler`."""

    path: str | None = Field(None, description="The checkpoint (named form).")
    sampling_session_id: str | None = Field(None, description="The sampling session (ephemeral form).")
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(RequestModel):
    """Body of `save_weights_external`: an export of the adapter that other programs load (PEFT format)."""

    model_id: Identifier = Field(description="The model.")
    seq_id: SeqId | None = Field(None, description=SEQ_ID_TEXT)
    path: Name = Field(description="Name of the export.")
    ttl_seconds: TtlSeconds | None = Field(None, description=_TTL_TEXT)
    age_encryption_recipients: list[Annotated[str, StringConstraints(max_length=16_384)]] | None = Field(
        None,
        max_length=10,
        description="Who can decrypt: age X25519 recipients (age1...) or SSH public keys (ssh-ed25519, ssh-rsa). Every "
        "file is then exported as `{name}.age` only. None or an empty list: the files are plain.",
    )
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResult(ResponseModel):
    """Result of `save_weights_external`."""

    path: str = Field(description="The export, tinker://{model_id}/external_weights/{name}.")
    size_bytes: int = Field(description="Size of its files.")
    type: Literal["save_weights_external"] = "save_weights_external"


class ExternalWeightsUrls(ResponseModel):
    """Result of `.../external_weights_urls`."""

    urls: dict[str, str] = Field(description="File name -> an address that works without a key until it expires.")
    expires: datetime = Field(description="When the addresses end; ask again for new ones.")


AccessToken = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
_CREATE_FIELDS = ("session_id", "model_seq_id", "base_model", "user_metadata", "optimizer_config")


class LoadWeightsRequest(RequestModel):
    """Body of `load_weights`: into an existing model (`model_id`), or into a new one that this call creates
    (`session_id` and `model_seq_id`; geometry and base model come from the checkpoint)."""

    path: TinkerPath = Field(description="The checkpoint.")
    optimizer: bool = Field(description="Load the optimizer state too; fails if the checkpoint has none.")
    weights_access_token: AccessToken | None = Field(
        None, description="An API key of the project that owns the checkpoint, if it is another one."
    )
    model_id: Identifier | None = Field(None, description="The model to load into.")
    seq_id: SeqId | None = Field(None, description=SEQ_ID_TEXT)
    session_id: Identifier | None = Field(None, description="The session that will own the new model.")
    model_seq_id: SessionCounter | None = Field(None, description="Counts the models of a session, from 0.")
    base_model: Label | None = Field(None, description="Must be that of the checkpoint, if it is given.")
    user_metadata: UserMetadata | None = Field(None, description="Free pairs of text for the new model.")
    optimizer_config: OptimizerConfig | None = Field(None, description="The optimizer family of the new model.")
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _one_form(self) -> LoadWeightsRequest:
        if self.model_id is not None:
            wrong = [name for name in _CREATE_FIELDS if getattr(self, name) is not None]
            if wrong:
                raise ValueError(f"with model_id (load into an existing model) there can be no {', '.join(wrong)}")
            return self
        if self.session_id is None or self.model_seq_id is None:
            raise ValueError("give model_id (an existing model), or session_id and model_seq_id (a new model)")
        if self.seq_id is not None:
            raise ValueError("seq_id belongs to model_id: creating a model is always its request 0")
        return self


class LoadWeightsResult(ResponseModel):
    """Result of `load_weights`."""

    path: str | None = Field(None, description="The checkpoint.")
    model_id: str | None = Field(None, description="The model that has the weights now.")
    type: Literal["load_weights"] = "load_weights"


class CopyWeightsRequest(RequestModel):
    """Body of `copy_weights`: into a project (`destination_project_id`), or as the training run of a place in a
    session (`session_id` and `model_seq_id`)."""

    source_path: TinkerPath = Field(description="The checkpoint; exports can be copied too.")
    destination_project_id: Identifier | None = Field(
        None, description="The project that will own the copy: that of the API key."
    )
    session_id: Identifier | None = Field(None, description="The session that will own the copy.")
    model_seq_id: SessionCounter | None = Field(None, description="Counts the models of a session, from 0.")
    ttl_seconds: TtlSeconds | None = Field(None, description=_TTL_TEXT + " That of the source is not inherited.")
    weights_access_token: AccessToken | None = Field(
        None, description="As the header X-Tinker-Weights-Access-Token: an API key of the project that owns the source."
    )
    type: Literal["copy_weights"] = "copy_weights"

    @model_validator(mode="after")
    def _one_form(self) -> CopyWeightsRequest:
        into_session = self.session_id is not None
        if into_session != (self.model_seq_id is not None) or into_session == (self.destination_project_id is not None):
            raise ValueError("give either destination_project_id, or session_id and model_seq_id")
        return self


class CopyWeightsResponse(ResponseModel):
    """Result of `copy_weights`."""

    tinker_path: str = Field(description="The copy: it has the kind and the name of its source.")


class CheckpointFile(ResponseModel):
    """A file of a checkpoint that may leave the server."""

    name: str = Field(description="Its name, as PEFT calls it; `.age` behind it if it is encrypted.")
    url: str = Field(description="An address that works without a key until it expires, with ranges and an ETag.")
    size_bytes: int = Field(description="Its size.")
    sha256: str | None = Field(None, description="SHA-256 of its content, in hex; absent for encrypted files.")


class CheckpointFilesResponse(ResponseModel):
    """Result of `.../files`."""

    files: list[CheckpointFile] = Field(description="The adapter in PEFT format.")
    expires: datetime = Field(description="When the addresses end; ask again for new ones.")


class ImportCheckpointRequest(RequestModel):
    """Fields of `checkpoints/import`, beside the file `adapter_model`. In the form, `adapter_config`, `ttl_seconds` and
    `user_metadata` are JSON, the others plain text."""

    name: Name = Field(description="Name of the checkpoint.")
    adapter_config: dict[str, Any] = Field(description="The content of adapter_config.json.")
    base_model: Label | None = Field(
        None, description="The served base model that the adapter is for; absent: the one that adapter_config names."
    )
    ttl_seconds: TtlSeconds | None = Field(None, description=_TTL_TEXT)
    user_metadata: UserMetadata | None = Field(None, description="Free pairs of text.")


class ImportCheckpointResponse(ResponseModel):
    """Result of `checkpoints/import`."""

    tinker_path: str = Field(description="The checkpoint, to be loaded without optimizer state, or sampled.")
    base_model: str = Field(description="The base model.")
    size_bytes: int = Field(description="Size of its files.")
    lora_rank: int = Field(description="Rank of the adapter.")
    train_attn: bool = Field(description="Whether the attention is adapted.")
    train_mlp: bool = Field(description="Whether the MLPs are adapted.")
    train_unembed: bool = Field(description="Whether the output head is adapted.")


class UnloadModelRequest(RequestModel):
    """Body of `unload_model`: free the live weights of a model once everything asked of it before is done."""

    model_id: Identifier = Field(description="The model.")
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResult(ResponseModel):
    """Result of `unload_model`."""

    model_id: str = Field(description="The model that takes no more work.")
    type: Literal["unload_model"] = "unload_model"


class WeightsInfoRequest(RequestModel):
    """Body of `weights_info`."""

    tinker_path: TinkerPath = Field(description="The checkpoint.")


class WeightsInfoResponse(ResponseModel):
    """Result of `weights_info`: all that is needed to make a model of the same geometry."""

    base_model: str = Field(description="The base model.")
    is_lora: bool = Field(description="Whether the weights are an adapter.")
    lora_rank: int | None = Field(None, description="Rank of the adapter.")
    train_unembed: bool | None = Field(None, description="Whether the output head is adapted.")
    train_mlp: bool | None = Field(None, description="Whether the MLPs are adapted.")
    train_attn: bool | None = Field(None, description="Whether the attention is adapted.")
    optimizer_config: OptimizerConfigResult = Field(
        default_factory=OptimizerConfigResult, description="The optimizer family."
    )


class SetTtlRequest(RequestModel):
    """Body of `.../ttl`; null keeps the checkpoint for ever."""

    ttl_seconds: TtlSeconds | None = Field(description=_TTL_TEXT + " Must be given, null removes it.")


class Checkpoint(ResponseModel):
    """A checkpoint in a list."""

    checkpoint_id: str = Field(description="`weights/{name}`, `sampler_weights/{name}` or `external_weights/{name}`.")
    checkpoint_type: Literal["training", "sampler", "external"] = Field(
        description="With optimizer state, for sampling, or an export."
    )
    time: datetime = Field(description="When it was written.")
    tinker_path: str = Field(description="What to load or sample it by.")
    size_bytes: int | None = Field(None, description="Size of its files.")
    public: bool = Field(False, description="Whether other projects may read it.")
    user_metadata: dict[str, str] | None = Field(None, description="As given when it was saved.")
    expires_at: datetime | None = Field(None, description="When it will be deleted; null = never.")


class Cursor(ResponseModel):
    """Which part of a list this is."""

    offset: int = Field(description="Items left out before.")
    limit: int = Field(description="Most items of this page.")
    total_count: int = Field(description="Items in all.")


class CheckpointsResponse(ResponseModel):
    """Result of `checkpoints` and `training_runs/{id}/checkpoints`."""

    checkpoints: list[Checkpoint] = Field(description="Newest first.")
    cursor: Cursor | None = Field(None, description="Absent if the list is complete.")


class TrainingRun(ResponseModel):
    """A training run: the life of one adapter."""

    training_run_id: str = Field(description="Identity; also the model_id.")
    base_model: str = Field(description="The base model.")
    model_owner: str = Field(description="The project that owns it.")
    is_lora: bool = Field(True, description="Whether it is an adapter.")
    corrupted: bool = Field(False, description="Whether its live weights were lost.")
    lora_rank: int | None = Field(None, description="Rank of the adapter.")
    last_request_time: datetime = Field(description="When it was last asked for something.")
    created_time: datetime = Field(description="When it was created. Not in the hosted service's answer, as `state`.")
    state: RunStateName = Field(
        description="`ready` takes work; `lost`: its live weights are gone; `closed`: unloaded, or its session ended."
    )
    metrics: RunMetricsSummary | None = Field(None, description="With include_metrics: what it measured, in short.")
    last_checkpoint: Checkpoint | None = Field(None, description="Its newest training checkpoint.")
    last_sampler_checkpoint: Checkpoint | None = Field(None, description="Its newest sampler checkpoint.")
    user_metadata: dict[str, str] | None = Field(None, description="As given at creation.")


class TrainingRunsResponse(ResponseModel):
    """Result of `training_runs`."""

    training_runs: list[TrainingRun] = Field(description="Newest first.")
    cursor: Cursor = Field(description="Which part of the list this is.")
