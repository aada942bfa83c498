"""Bodies of uploaded losses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from schemas.http.base import Identifier, Items, Label, One, RequestModel, ResponseModel, SessionCounter


class CustomLossInput(RequestModel):
    """One parameter of the loss."""

    name: str = Field(max_length=64, description="`logprobs` (always first), or a name in `loss_fn_inputs`.")
    rank: int = Field(ge=0, le=2, description="0: a scalar, 1: [T], 2: [T, K].")


class CustomLossNode(RequestModel):
    """One node of a traced loss."""

    op: str = Field(max_length=64, description="placeholder, call_function, call_method or output.")
    name: str = Field(max_length=128, description="Unique; later nodes refer to it.")
    target: str = Field(max_length=256, description="The parameter, function, or method.")
    args: Items[Any] = Field(default_factory=list, description="Encoded arguments; see docs/losses.md.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Encoded keyword arguments.")


class CustomLossGraph(RequestModel):
    """A loss as torch.fx traced it: its nodes in order."""

    format: One = Field(1, description="Accepted: 1.")
    nodes: Items[CustomLossNode] = Field(description="The nodes, placeholders first, one output last.")


class CreateCustomLossRequest(RequestModel):
    """Body of `create_custom_loss`: a loss that runs on the server, example by example."""

    session_id: Identifier = Field(description="The session that owns the loss.")
    custom_loss_seq_id: SessionCounter = Field(description="Counts the losses of a session, from 0; repeats are safe.")
    name: Label = Field(description="For people.")
    inputs: Items[CustomLossInput] = Field(description="Its parameters in order.")
    graph: CustomLossGraph = Field(description="What it computes.")
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResult(ResponseModel):
    """Result of `create_custom_loss`."""

    loss_id: str = Field(description="Give it as loss_fn_config.loss_id, with loss_fn custom.")
    type: Literal["create_custom_loss"] = "create_custom_loss"
