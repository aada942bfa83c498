"""Bodies of sampling: sampling sessions, samplers and samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from schemas.http.base import (
    MAX_INT32,
    MAX_INT64,
    Identifier,
    Items,
    Label,
    RequestModel,
    ResponseModel,
    SessionCounter,
    TinkerPath,
    TokenId,
)
from schemas.http.tensors import JsonNumber, ModelInput, TensorData, TensorDataResult

MAX_SAMPLES = 1024
MAX_TOP = 1024
MIN_TEMPERATURE = 1e-5
"""The smallest temperature above 0: below it float32 logits overflow when divided. 0 itself is greedy."""

MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1024
MAX_STOP_LENGTH = 1024
"""Characters of one stop string."""

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]


class CreateSamplingSessionRequest(RequestModel):
    """Body of `create_sampling_session`: on a checkpoint (`model_path`) or on a base model (`base_model`)."""

    session_id: Identifier = Field(description="The session that owns the sampler.")
    sampling_session_seq_id: SessionCounter = Field(description="Counts the samplers of a session, from 0.")
    model_path: TinkerPath | None = Field(None, description="The checkpoint to sample.")
    base_model: Label | None = Field(None, description="The base model; with model_path it must be the checkpoint's.")
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @model_validator(mode="after")
    def _samples_something(self) -> CreateSamplingSessionRequest:
        if self.model_path is None and self.base_model is None:
            raise ValueError("give model_path (a checkpoint) or base_model")
        return self


class CreateSamplingSessionResponse(ResponseModel):
    """Result of `create_sampling_session`."""

    sampling_session_id: str = Field(description="What to sample by.")
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(RequestModel):
    """Body of `join_sampling_session`: a copy of a sampling client, in another process perhaps."""

    sampling_session_id: Identifier = Field(description="The sampling session.")
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(ResponseModel):
    """Result of `join_sampling_session`."""

    client_counter: int = Field(
        description="Number of this client in the sampling session; the first client is 0. Its requests are numbered "
        "from client_counter * 1000000000."
    )
    type: Literal["join_sampling_session"] = "join_sampling_session"


class SamplerResponse(ResponseModel):
    """Result of `samplers/{id}`."""

    sampler_id: str = Field(description="The sampling session.")
    base_model: str = Field(description="The base model.")
    model_path: str | None = Field(None, description="The checkpoint; absent = the plain base model.")


class SamplingParams(RequestModel):
    """How to draw tokens."""

    max_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="Most tokens to draw; absent = to the end of the context."
    )
    seed: int | None = Field(None, ge=0, description="Any size; sample i uses a stream of its own, drawn from both.")
    stop: (
        Annotated[Items[StopString], Field(max_length=MAX_STOP_STRINGS)]
        | Annotated[Items[TokenId], Field(max_length=MAX_STOP_TOKENS)]
        | StopString
        | None
    ) = Field(None, description="Strings or token ids that end a sample; absent = end of sequence, [] = nothing does.")
    temperature: float = Field(1.0, ge=0, le=1000, description="0 = greedy, else 0.00001 to 1000.")
    top_k: int = Field(-1, ge=-1, le=MAX_INT32, description="Draw from the k likeliest; -1 or 0 = from all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Draw from the likeliest tokens that together have this mass.")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_form(cls, value: object) -> object:
        """Says in one sentence what is wrong; the union would say it once for each of its forms."""
        items = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(items, list):
            raise ValueError("must be a string, a list of strings or a list of token ids")
        texts = [item for item in items if isinstance(item, str)]
        if texts and len(texts) < len(items):
            raise ValueError("holds strings and other values; accepted are strings alone or token ids alone")
        most = MAX_STOP_STRINGS if texts else MAX_STOP_TOKENS
        if len(items) > most:
            raise ValueError(f"holds {len(items)} {'strings' if texts else 'token ids'}; at most {most} are accepted")
        if not all(0 < len(text) <= MAX_STOP_LENGTH for text in texts):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
        for item in () if texts else items:
            if not isinstance(item, int) or isinstance(item, bool):
                raise ValueError(f"holds a value of type {type(item).__name__}; accepted are strings or token ids")
            if not 0 <= item <= MAX_INT32:
                raise ValueError(f"holds {item}; a token id is 0 to {MAX_INT32}")
        return value

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"a temperature is 0 (greedy), or {MIN_TEMPERATURE} to 1000")
        return abs(value)  # -0.0 becomes 0.0

    @field_validator("top_k")
    @classmethod
    def _off_has_one_value(cls, value: int) -> int:
        return value or -1


class SampleRequest(RequestModel):
    """Body of `asample`."""

    sampling_session_id: Identifier = Field(description="From create_sampling_session or save_weights_for_sampler.")
    seq_id: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = Field(
        None, description="Recognises a repeat within the sampling session, from 0. Absent: the server assigns one."
    )
    prompt: ModelInput = Field(description="The tokens to continue.")
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES, description="Independent continuations.")
    sampling_params: SamplingParams = Field(default_factory=SamplingParams, description="How to draw.")
    prompt_logprobs: bool | None = Field(False, description="Score the tokens of the prompt.")
    topk_prompt_logprobs: int = Field(0, ge=0, le=MAX_TOP, description="Likeliest tokens per prompt position.")
    topk_sample_logprobs: int = Field(0, ge=0, le=MAX_TOP, description="Likeliest tokens per drawn position.")
    target_prompt_logprobs: TensorData | None = Field(
        None, description="Token ids to score, int64 [L-1, K]; row i is about prompt position i+1; -1 asks nothing."
    )
    prompt_alt_tokens_k: int = Field(0, ge=0, le=MAX_TOP, description="Draws per prompt position after the first.")
    prompt_logprobs_last_n: int | None = Field(
        None, ge=1, description="Score only the last n tokens of the prompt, at most L-1; needs prompt_logprobs."
    )
    record_stability_info: bool | None = Field(
        False, description="Remember how likely the drawn tokens were, for losses that ask for it by sequence id."
    )
    type: Literal["sample"] = "sample"

    @field_validator("prompt_logprobs_last_n")
    @classmethod
    def _last_n_fits(cls, value: int | None, earlier: ValidationInfo) -> int | None:
        fields = earlier.data
        if value is None or not {"prompt", "prompt_logprobs", "topk_prompt_logprobs"} <= fields.keys():
            return value
        if not (fields["prompt_logprobs"] or fields["topk_prompt_logprobs"]):
            raise ValueError("it needs prompt_logprobs: true")
        length = sum(len(chunk.tokens) for chunk in fields["prompt"].chunks)
        if value >= length:
            raise ValueError(f"{value} is too many: a prompt of {length} tokens has {length - 1} that can be scored")
        return value

    @model_validator(mode="before")
    @classmethod
    def _no_model_in_a_sample(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in ("base_model", "model_path"):
                if value.get(name) is not None:
                    raise ValueError(
                        f"{name} is not read here: name it in create_sampling_session, "
                        "and give the sampling_session_id that it returns"
                    )
        return value


class TopAlternatives(ResponseModel):
    """Tokens drawn beside each prompt position."""

    tokens: TensorDataResult = Field(description="Token ids, [L-1, k].")
    logprobs: TensorDataResult = Field(description="Their logprobs, [L-1, k].")


TopkRow = list[tuple[int, JsonNumber]] | None
"""(token id, logprob) pairs, best first; null = not computed."""


class SampledSequenceResult(ResponseModel):
    """One continuation."""

    stop_reason: Literal["stop", "length"] = Field(description="Why it ended.")
    tokens: list[int] = Field(description="Token ids; what stopped the sample is the end of them.")
    logprobs: list[JsonNumber] = Field(description="Logprob of each token.")
    topk_logprobs: list[TopkRow] | None = Field(None, description="Likeliest tokens per position, if asked for.")


class SampleResponse(ResponseModel):
    """Result of `asample` for clients that accept JSON."""

    sequences: list[SampledSequenceResult] = Field(description="num_samples continuations.")
    prompt_logprobs: list[JsonNumber] | None = Field(
        None, description="One per prompt token; null = not scored (the first never is)."
    )
    topk_prompt_logprobs: list[TopkRow] | None = Field(None, description="Likeliest tokens per prompt position.")
    target_prompt_logprobs: TensorDataResult | None = Field(None, description="0 where nothing was asked.")
    prompt_alt_tokens: TopAlternatives | None = Field(None, description="Draws beside the prompt.")
    prompt_cache_hit_tokens: int = Field(0, description="Prompt tokens that needed no computing.")
    type: Literal["sample"] = "sample"
