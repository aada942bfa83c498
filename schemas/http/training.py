"""Bodies of the training primitives: forward, forward_backward, optim_step, zero_grad.

`forward_backward` is protobuf when the SDK sends it (`schemas/proto`); the JSON form here is for every other client.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from schemas.http.base import MAX_INT32, SEQ_ID_TEXT, Identifier, Items, RequestModel, ResponseModel, SeqId
from schemas.http.tensors import ModelInput, TensorData, TensorDataResult

MAX_STEP_SIZE = 1000.0
"""Bound of learning rate and weight decay: far above use, far below what overflows float32 weights."""


class ProvenanceSpan(RequestModel):
    """A run of positions that are tokens of a sampled sequence, or of the prompt that it was sampled from."""

    type: Literal["prompt_tokens", "sampled_tokens"] = Field(description="Of the prompt, or of what was sampled.")
    sequence_id: str = Field(min_length=1, max_length=512, description="The sampled sequence.")
    offset: int = Field(0, ge=0, le=MAX_INT32, description="Where the run begins in it.")
    length: int = Field(ge=0, le=MAX_INT32, description="Tokens of the run.")


Spans = Annotated[Items[ProvenanceSpan], Field(max_length=4096)]


class Datum(RequestModel):
    """One example of N tokens. Position i of every tensor is about the token after position i."""

    model_input: ModelInput = Field(description="The N tokens that the model reads.")
    loss_fn_inputs: dict[str, TensorData] = Field(
        description="The tensors of the loss, each with first dimension N.", max_length=64
    )
    model_input_spans: Spans | None = Field(
        None,
        description="Where the tokens of the input come from: runs that cover all of it. Read by stable_reinforce.",
    )
    loss_fn_input_spans: Spans | None = Field(None, description="The same for target_tokens; both lists or none.")


Data = Annotated[Items[Datum], Field(min_length=1)]
LossConfig = dict[str, float | str]


class ForwardBackwardInput(RequestModel):
    """The older, nested form of the same fields."""

    data: Data = Field(description="The examples.")
    loss_fn: str = Field(description="Name of the loss.", max_length=256)
    loss_fn_config: LossConfig | None = Field(None, description="Parameters of the loss.", max_length=64)


class ForwardBackwardRequest(RequestModel):
    """JSON body of `forward_backward` and `forward`.

    Either flat (`data` or `datums`, `loss_fn`, `loss_fn_config`), or nested in `forward_backward_input`
    (`forward_input`: without gradient). Losses are sums over positions and examples; gradients add up.
    """

    model_id: Identifier = Field(description="The model.")
    seq_id: SeqId | None = Field(None, description=SEQ_ID_TEXT)
    data: Data | None = Field(None, description="The examples.")
    datums: Data | None = Field(None, description="Another name of `data`.")
    loss_fn: str | None = Field(None, description="Name of the loss.", max_length=256)
    loss_fn_config: LossConfig | None = Field(None, description="Parameters of the loss.", max_length=64)
    forward_only: bool | None = Field(None, description="Compute loss and logprobs, but no gradient.")
    forward_backward_input: ForwardBackwardInput | None = Field(None, description="The nested form.")
    forward_input: ForwardBackwardInput | None = Field(None, description="The nested form of `forward`.")
    type: Literal["forward_backward", "forward"] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ForwardBackwardRequest:
        given = [
            n for n in ("data", "datums", "forward_backward_input", "forward_input") if getattr(self, n) is not None
        ]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(
                "give the examples once, as data, datums, forward_backward_input or forward_input; found " + found
            )
        if given[0] in ("data", "datums"):
            if self.loss_fn is None:
                raise ValueError("loss_fn is missing")
        elif self.loss_fn is not None or self.loss_fn_config is not None:
            raise ValueError(f"loss_fn and loss_fn_config belong inside {given[0]}")
        wants_forward = self.forward_input is not None or self.type == "forward"
        if self.forward_only is False and wants_forward:
            raise ValueError("forward_only is false, but the rest of the body asks for a forward pass only")
        return self


class ForwardBackwardOutput(ResponseModel):
    """Result of `forward` and `forward_backward` for clients that accept JSON."""

    loss_fn_output_type: str = Field("ArrayRecord", description="Always ArrayRecord.")
    loss_fn_outputs: list[dict[str, TensorDataResult]] = Field(
        description="One per example, in order; `logprobs` has the shape of the example's target_tokens."
    )
    metrics: dict[str, float | Literal["NaN", "Infinity", "-Infinity"]] = Field(
        description="`name:reduction`; `loss:sum` is always there."
    )


def _say_defaults(schema: dict[str, Any]) -> None:
    """Move the defaults of hyperparameters into their descriptions. Generated clients send every default, and a value
    that is given under two names, or in two places, is refused."""
    for name in _ADAM_NAMES & schema["properties"].keys():
        field = schema["properties"][name]
        default = field.pop("default", None)
        if default is not None:
            field["description"] += f" Absent: {default:g}."


class AdamFields(RequestModel):
    """The hyperparameters of AdamW, given anew with every step. `lr` and `betas` are other names of the same values;
    after validation they are resolved into `learning_rate`, `beta1` and `beta2`."""

    model_config = ConfigDict(json_schema_extra=_say_defaults)

    learning_rate: float = Field(1e-4, ge=0, le=MAX_STEP_SIZE, description="Step size.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-12, gt=0, le=1, description="Added to the denominator.")
    weight_decay: float = Field(0.0, ge=0, le=MAX_STEP_SIZE, description="Decoupled weight decay.")
    grad_clip_norm: float = Field(0.0, ge=0, le=3e38, description="Bound of the global gradient norm; 0 = off.")
    lr: float | None = Field(None, ge=0, le=MAX_STEP_SIZE, description="Another name of learning_rate.", exclude=True)
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[beta1, beta2].", exclude=True
    )

    @model_validator(mode="after")
    def _resolve_other_names(self) -> AdamFields:
        if self.lr is not None:
            if "learning_rate" in self.model_fields_set:
                raise ValueError("lr and learning_rate are two names of one value: give one of them")
            self.learning_rate, self.lr = self.lr, None
        if self.betas is not None:
            if self.model_fields_set & {"beta1", "beta2"}:
                raise ValueError("betas and beta1/beta2 are two names of the same values: give one form")
            self.beta1, self.beta2 = self.betas
            self.betas = None
        return self


class AdamParams(AdamFields):
    """`adam_params` of an optimizer step."""


class AdamOptimizerParams(AdamFields):
    """`optimizer_params` of a model that is trained by AdamW: like adam_params, with the family named."""

    type: Literal["adamw"] = Field(description="The optimizer of the model.")


class DimuonParams(RequestModel):
    """`optimizer_params` of a model that is trained by Dimuon; see `docs/optimizers.md`."""

    type: Literal["dimuon"] = Field(description="The optimizer of the model.")
    learning_rate: float = Field(ge=0, le=MAX_STEP_SIZE, description="Step size at rank 32.")
    grad_clip_norm: float = Field(0.0, ge=-3e38, le=3e38, description="Bound of the global gradient norm; <= 0 = off.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the momentum.")
    damping: float = Field(1e-4, gt=1e-30, le=1e30, description="Smooths the balancing of rows and columns.")
    rank_lr_correction_exponent: float = Field(
        0.175, ge=-10, le=10, description="The step size is learning_rate * (rank / 32) to this power."
    )


OptimizerParams = Annotated[AdamOptimizerParams | DimuonParams, Field(discriminator="type")]


_ADAM_NAMES = frozenset(AdamFields.model_fields)


class OptimStepRequest(AdamFields):
    """Body of `optim_step`: hyperparameters in `adam_params`, in `optimizer_params`, or at the top level.

    After validation the top-level fields hold the resolved values of AdamW, whichever form was used, or
    `optimizer_params` those of Dimuon. Absent ones have the defaults given here; nothing is remembered from an earlier
    step.
    """

    model_id: Identifier = Field(description="The model.")
    seq_id: SeqId | None = Field(None, description=SEQ_ID_TEXT)
    adam_params: AdamParams | None = Field(None, description="The hyperparameters.")
    optimizer_params: OptimizerParams | None = Field(None, description="The same, with the family named.")
    type: Literal["optim_step"] = "optim_step"
    _given_in: str = PrivateAttr("adam_params")

    @property
    def given_in(self) -> str:
        """The field that held the hyperparameters (`adam_params` also if they were at the top level)."""
        return self._given_in

    @model_validator(mode="after")
    def _one_form(self) -> OptimStepRequest:
        nested = [p for p in (self.adam_params, self.optimizer_params) if p is not None]
        top = sorted(self.model_fields_set & _ADAM_NAMES)
        if len(nested) == 2 or (nested and top):
            raise ValueError(
                "give the hyperparameters once, in adam_params, in optimizer_params or at the top level"
                + (f"; found also {', '.join(top)} at the top level" if top else "")
            )
        if nested:
            self._given_in = "adam_params" if self.optimizer_params is None else "optimizer_params"
            if isinstance(nested[0], DimuonParams):
                return self
            for name in _ADAM_NAMES:
                setattr(self, name, getattr(nested[0], name))
            self.adam_params = self.optimizer_params = None
        return self


class OptimStepResult(ResponseModel):
    """Result of `optim_step`."""

    metrics: dict[str, float] | None = Field(None, description="`grad_norm` (before clipping) and others.")


class ZeroGradRequest(RequestModel):
    """Body of `zero_grad`: forget the accumulated gradient of a model, in order with its other requests."""

    model_id: Identifier = Field(description="The model.")
    seq_id: SeqId | None = Field(None, description=SEQ_ID_TEXT)
    type: Literal["zero_grad"] = "zero_grad"


class ZeroGradResult(ResponseModel):
    """Result of `zero_grad`."""

    type: Literal["zero_grad"] = "zero_grad"
