"""Bodies of models: creating a training run and asking what it is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from schemas.http.base import (
    MAX_INT64,
    Identifier,
    Label,
    One,
    RequestModel,
    ResponseModel,
    SessionCounter,
    UserMetadata,
)
from schemas.operations import OptimizerType

MAX_LORA_RANK = 1024
"""Beyond this an adapter outgrows the matrices it adapts; servers usually allow less."""


class LoraConfig(RequestModel):
    """Geometry of the adapter. Scaling is 32 / rank; at least one of the three families must be trained."""

    rank: int = Field(32, ge=1, le=MAX_LORA_RANK, description="Rank of the adapter matrices.")
    seed: int | None = Field(
        None, ge=0, le=MAX_INT64, description="Seed of the initial weights; absent = the server draws one."
    )
    train_unembed: bool = Field(True, description="Adapt the output head.")
    train_mlp: bool = Field(True, description="Adapt every linear layer of the MLPs.")
    train_attn: bool = Field(True, description="Adapt every linear projection of the attention.")

    @model_validator(mode="after")
    def _trains_something(self) -> LoraConfig:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_unembed, train_mlp and train_attn must be true")
        return self


class OptimizerConfig(RequestModel):
    """The optimizer of a model, fixed when it is created; see `docs/optimizers.md`."""

    type: OptimizerType = Field("adamw", description="Accepted: adamw, dimuon.")
    version: One | None = Field(None, description="Of dimuon: 1.")

    @model_validator(mode="after")
    def _only_dimuon_has_versions(self) -> OptimizerConfig:
        if self.version is not None and self.type != "dimuon":
            raise ValueError(f"version belongs to dimuon; {self.type} has none")
        return self


class CreateModelRequest(RequestModel):
    """Body of `create_model`; the model's id will be `{session_id}:train:{model_seq_id}`."""

    session_id: Identifier = Field(description="The session that owns the model.")
    model_seq_id: SessionCounter = Field(description="Counts the models of a session, from 0. A repeat is recognised.")
    base_model: Label = Field(description="One of the names in get_server_capabilities.")
    user_metadata: UserMetadata | None = Field(None, description="Free pairs of text.")
    lora_config: LoraConfig = Field(default_factory=LoraConfig, description="Geometry of the adapter.")
    optimizer_config: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer family.")
    type: Literal["create_model"] = "create_model"


class CreateModelResult(ResponseModel):
    """Result of `create_model`."""

    model_id: str = Field(description="Identity of the model (= of the training run).")
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(RequestModel):
    """Body of `get_info`."""

    model_id: Identifier = Field(description="The model.")
    type: Literal["get_info"] = "get_info"


class ModelData(ResponseModel):
    """What a model was made of."""

    arch: str | None = Field(None, description="Architecture of the base model.")
    model_name: str = Field(description="The base model.")
    tokenizer_id: str | None = Field(None, description="What a client can load the tokenizer by.")


class OptimizerConfigResult(ResponseModel):
    """The optimizer of a model."""

    type: OptimizerType = Field("adamw", description="adamw or dimuon.")
    version: One | None = Field(None, description="1 for dimuon, absent for adamw.")

    @classmethod
    def of(cls, optimizer: OptimizerType) -> OptimizerConfigResult:
        """As a client wrote it when it chose this optimizer."""
        return cls(type=optimizer, version=1 if optimizer == "dimuon" else None)


class GetInfoResponse(ResponseModel):
    """Result of `get_info`."""

    model_id: str = Field(description="The model.")
    model_data: ModelData = Field(description="What it was made of.")
    is_lora: bool = Field(True, description="Whether it is an adapter.")
    lora_rank: int | None = Field(None, description="Rank of the adapter.")
    lora_alpha: int | None = Field(None, description="The update is scaled by lora_alpha / lora_rank.")
    lora_seed: int | None = Field(None, description="Seed of the initial weights, the client's or the one drawn here.")
    train_attn: bool | None = Field(None, description="Whether the attention is adapted.")
    train_mlp: bool | None = Field(None, description="Whether the MLPs are adapted.")
    train_unembed: bool | None = Field(None, description="Whether the output head is adapted.")
    model_name: str | None = Field(None, description="The base model.")
    optimizer_config: OptimizerConfigResult = Field(
        default_factory=OptimizerConfigResult, description="The optimizer family."
    )
    type: Literal["get_info"] = "get_info"
