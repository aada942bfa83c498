"""Bodies of the OpenAI-compatible routes: models, completions, chat completions.

A parameter either does what OpenAI says of it, or takes only the value that changes nothing, or is not there. Not
responsible for what depends on the model (context, template, tokenizer).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.http.base import MAX_INT32, Items, Label, RequestModel, ResponseModel, TokenId
from schemas.http.sampling import MIN_TEMPERATURE, StopString

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
MAX_TOOLS = 128


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"a temperature is 0 (greedy), or {MIN_TEMPERATURE} to 2")
    return abs(value)


def _no_penalty(value: float) -> float:
    if value != 0:
        raise ValueError(f"{value:g} is not supported; 0 (the default) is")
    return value


def _nothing(value: dict[str, Any]) -> dict[str, Any]:
    if value:
        raise ValueError("is not supported; an empty object is the same as leaving it out")
    return value


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""As `Label`, with room for a checkpoint path."""

Prompt = str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
Stop = StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_temperature)]
NoPenalty = Annotated[float, AfterValidator(_no_penalty)]
NoBias = Annotated[dict[str, Any], AfterValidator(_nothing)]


class StreamOptions(RequestModel):
    """What a stream tells beside its text."""

    include_usage: bool = Field(False, description="A last chunk with the usage.")


class OpenAISampling(RequestModel):
    """What both kinds of completion take."""

    model: ModelName = Field(description="A base model, or a checkpoint: tinker://...")
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT32, description="Most tokens to draw.")
    temperature: Temperature | None = Field(None, description="0 = greedy; absent: 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Draw from the likeliest tokens of this mass; absent: 1.")
    top_k: int | None = Field(
        None, ge=-1, le=MAX_INT32, description="Draw from the k likeliest; -1 or 0 = from all. Not OpenAI's."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Continuations of each prompt; absent: 1.")
    seed: int | None = Field(None, ge=0, description="The same request with the same seed draws the same tokens.")
    stop: Stop | None = Field(
        None, description="Strings that end the text and are no part of it; the end of sequence always ends it."
    )
    stream: bool | None = Field(None, description="Send the text token by token, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    presence_penalty: NoPenalty | None = Field(None, description="Only 0.")
    frequency_penalty: NoPenalty | None = Field(None, description="Only 0.")
    logit_bias: NoBias | None = Field(None, description="Only an empty object.")
    user: str | None = Field(None, description="Read by nobody.")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> OpenAISampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(OpenAISampling):
    """Body of `completions`."""

    prompt: Prompt = Field(description="A text, a list of texts, token ids, or a list of lists of token ids.")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INT32, description="Most tokens to draw; absent: 16. 0 only with echo."
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Logprobs of the tokens, and of so many alternatives."
    )
    echo: bool | None = Field(None, description="Let the text begin with the prompt.")
    best_of: int | None = Field(None, ge=1, description="Only the same as n.")
    suffix: None = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of {self.best_of} is not supported; only the same as n ({self.n or 1}) is")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 draws nothing; it is accepted only with echo: true")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("logprobs with echo are not streamed; leave out stream, echo or logprobs")
        return self


class TextPart(RequestModel):
    """A part of a message. Parts are joined by line breaks."""

    type: Literal["text"] = Field(description="Only text is read.")
    text: str = Field(description="The text.")


class CalledFunction(RequestModel):
    """A call that the assistant made."""

    name: Label = Field(description="Name of the function.")
    arguments: str = Field(description="Its arguments, a JSON object as text.")


class ToolCall(RequestModel):
    """A call in an assistant's message."""

    id: str = Field(description="What the answer names.")
    type: Literal["function"] = Field("function", description="Only functions.")
    function: CalledFunction = Field(description="What was called.")


class ChatMessage(RequestModel):
    """One message. What an answer holds may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Who speaks.")
    content: str | Annotated[Items[TextPart], Field(max_length=MAX_MESSAGES)] | None = Field(
        None, description="What is said; null only beside tool_calls."
    )
    name: Label | None = Field(None, description="For templates that read it.")
    tool_calls: Annotated[Items[ToolCall], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Calls of an assistant."
    )
    tool_call_id: str | None = Field(None, description="The call that a tool answers.")
    refusal: None = Field(None, description="As in an answer.")
    audio: None = Field(None, description="As in an answer.")
    function_call: None = Field(None, description="As in an answer.")
    annotations: Annotated[Items[dict[str, Any]], Field(max_length=0)] | None = Field(
        None, description="As in an answer."
    )

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, except in an assistant's message with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are an assistant's, not of role {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is required in a message of role 'tool'")
        return self


class FunctionDefinition(RequestModel):
    """A function that the model may ask for."""

    name: Label = Field(description="Its name.")
    description: str | None = Field(None, description="What it does.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: Literal[False] | None = Field(None, description="Only false: nothing holds the model to the schema.")


class Tool(RequestModel):
    """A tool, written into the prompt by the model's chat template."""

    type: Literal["function"] = Field(description="Only functions.")
    function: FunctionDefinition = Field(description="The function.")


class TextFormat(RequestModel):
    """The only form of answers."""

    type: Literal["text"] = Field(description="Only text.")


class ChatCompletionRequest(OpenAISampling):
    """Body of `chat/completions`."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The chat so far."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="Most tokens to draw; absent: to the end of the context."
    )
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="Older name of max_completion_tokens.")
    logprobs: bool | None = Field(None, description="Logprobs of the tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives per token; needs logprobs."
    )
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Told to models whose template has a place for them. Calls come as the text that they are."
    )
    tool_choice: Literal["auto", "none"] | None = Field(None, description="none = as if there were no tools.")
    parallel_tool_calls: Literal[True] | None = Field(None, description="Only true.")
    response_format: TextFormat | None = Field(None, description="Only text.")
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = Field(
        None, description="Only text."
    )
    store: Literal[False] | None = Field(None, description="Only false.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one.")
    metadata: dict[str, str] | None = Field(None, description="Read by nobody.")

    @model_validator(mode="after")
    def _fits_together(self) -> ChatCompletionRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


# -- answers -----------------------------------------------------------------------------------------------------------
class OpenAIErrorDetail(ResponseModel):
    """What is wrong."""

    message: str = Field(description="One sentence, with what would be accepted.")
    type: str = Field(description="Kind of error.")
    param: str | None = Field(description="The parameter at fault.")
    code: str | None = Field(description="A stable code: see docs/errors.md.")


class OpenAIErrorResponse(ResponseModel):
    """Every error of the OpenAI-compatible routes."""

    error: OpenAIErrorDetail = Field(description="The error.")


class OpenAIModel(ResponseModel):
    """A name that `model` takes."""

    id: str = Field(description="The name.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds; 0 for base models.")
    owned_by: str = Field(description="The training run of a checkpoint.")


class OpenAIModelList(ResponseModel):
    """Result of `models`."""

    object: Literal["list"] = "list"
    data: list[OpenAIModel] = Field(description="Base models, then the caller's own sampler checkpoints.")


class PromptTokensDetails(ResponseModel):
    """Of a prompt."""

    cached_tokens: int = Field(description="Tokens that needed no computing.")


class OpenAIUsage(ResponseModel):
    """What was used."""

    prompt_tokens: int = Field(description="Tokens of the prompts, each counted once.")
    completion_tokens: int = Field(description="Tokens drawn, what stopped them included.")
    total_tokens: int = Field(description="Both.")
    prompt_tokens_details: PromptTokensDetails = Field(description="Of the prompts.")


class CompletionLogprobs(ResponseModel):
    """Logprobs of the tokens of a text."""

    tokens: list[str] = Field(description="The tokens.")
    token_logprobs: list[float | None] = Field(description="null where nothing comes before the token.")
    top_logprobs: list[dict[str, float] | None] | None = Field(description="Likeliest tokens and the token itself.")
    text_offset: list[int] = Field(description="Where in the text each token begins.")


class CompletionChoice(ResponseModel):
    """One continuation."""

    index: int = Field(description="Prompt times n, plus the number of the continuation.")
    text: str = Field(description="The text.")
    logprobs: CompletionLogprobs | None = Field(description="If asked for.")
    finish_reason: Literal["stop", "length"] = Field(description="Why it ended.")


class CompletionResponse(ResponseModel):
    """Result of `completions`."""

    id: str = Field(description="Of this answer.")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="As asked for.")
    choices: list[CompletionChoice] = Field(description="The continuations.")
    usage: OpenAIUsage = Field(description="What was used.")


class AlternativeToken(ResponseModel):
    """A token that could have been drawn."""

    token: str = Field(description="Its text.")
    logprob: float = Field(description="Its logprob.")
    bytes: list[int] = Field(description="Its bytes.")


class TokenLogprob(AlternativeToken):
    """A token of the text."""

    top_logprobs: list[AlternativeToken] = Field(description="The likeliest tokens there.")


class ChatLogprobs(ResponseModel):
    """Logprobs of an assistant's text."""

    content: list[TokenLogprob] = Field(description="Of each token.")
    refusal: None = None


class AssistantMessage(ResponseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str = Field(description="The text.")
    refusal: None = None


class ChatChoice(ResponseModel):
    """One continuation."""

    index: int = Field(description="Its number.")
    message: AssistantMessage = Field(description="The message.")
    logprobs: ChatLogprobs | None = Field(description="If asked for.")
    finish_reason: Literal["stop", "length"] = Field(description="Why it ended.")


class ChatCompletionResponse(ResponseModel):
    """Result of `chat/completions`."""

    id: str = Field(description="Of this answer.")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="As asked for.")
    choices: list[ChatChoice] = Field(description="The continuations.")
    usage: OpenAIUsage = Field(description="What was used.")
