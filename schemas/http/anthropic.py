"""Bodies of the Anthropic-compatible routes: messages and their tokens counted.

As in `openai.py`: a parameter does what it says, or takes only the value that changes nothing, or is not there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from schemas.http.base import MAX_INT32, Items, Label, RequestModel, ResponseModel
from schemas.http.openai import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ModelName
from schemas.http.sampling import MIN_TEMPERATURE, StopString


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"a temperature is 0 (greedy), or {MIN_TEMPERATURE} to 1")
    return abs(value)


class CacheControl(RequestModel):
    """A hint. Prompts are cached by themselves, so it changes nothing."""

    type: Literal["ephemeral"] = Field(description="There is one kind.")
    ttl: Literal["5m", "1h"] | None = Field(None, description="Not used.")


class TextBlock(RequestModel):
    """A part of a message. Parts are joined by line breaks."""

    type: Literal["text"] = Field(description="Text.")
    text: str = Field(description="The text.")
    cache_control: CacheControl | None = Field(None, description="Changes nothing.")
    citations: None = Field(None, description="As in an answer.")


class ToolUseBlock(RequestModel):
    """A call that the assistant made."""

    type: Literal["tool_use"] = Field(description="A call.")
    id: str = Field(description="What the result names.")
    name: Label = Field(description="The tool.")
    input: dict[str, Any] = Field(description="Its arguments.")
    cache_control: CacheControl | None = Field(None, description="Changes nothing.")


class ToolResultBlock(RequestModel):
    """What a tool answered."""

    type: Literal["tool_result"] = Field(description="An answer.")
    tool_use_id: str = Field(description="The call.")
    content: str | Annotated[Items[TextBlock], Field(max_length=MAX_MESSAGES)] | None = Field(
        None, description="The answer."
    )
    is_error: Literal[False] | None = Field(None, description="Only false: say in the content what went wrong.")
    cache_control: CacheControl | None = Field(None, description="Changes nothing.")


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(RequestModel):
    """One message."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.")
    content: str | Annotated[Items[Block], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="What is said."
    )


class AnthropicTool(RequestModel):
    """A tool, written into the prompt by the model's chat template."""

    type: Literal["custom"] | None = Field(None, description="Only tools of the caller.")
    name: Label = Field(description="Its name.")
    description: str | None = Field(None, description="What it does.")
    input_schema: dict[str, Any] = Field(description="JSON schema of its arguments.")
    cache_control: CacheControl | None = Field(None, description="Changes nothing.")


class ToolChoice(RequestModel):
    """Whether tools may be used."""

    type: Literal["auto", "none"] = Field(description="none = as if there were no tools.")


class NoThinking(RequestModel):
    """There is no separate thinking."""

    type: Literal["disabled"] = Field(description="Only disabled.")


class CountTokensRequest(RequestModel):
    """Body of `messages/count_tokens`."""

    model: ModelName = Field(description="A base model, or a checkpoint: tinker://...")
    messages: Annotated[Items[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The chat so far; the last message is the user's."
    )
    system: str | Annotated[Items[TextBlock], Field(max_length=MAX_MESSAGES)] | None = Field(
        None, description="What the assistant should know."
    )
    tools: Annotated[Items[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Told to models whose template has a place for them. Calls come as the text that they are."
    )
    tool_choice: ToolChoice | None = Field(None, description="Whether tools may be used.")
    thinking: NoThinking | None = Field(None, description="Only disabled.")
    cache_control: CacheControl | None = Field(None, description="Changes nothing.")


class RequestMetadata(RequestModel):
    """About the caller."""

    user_id: str | None = Field(None, description="Read by nobody.")


class MessagesRequest(CountTokensRequest):
    """Body of `messages`."""

    max_tokens: int = Field(ge=1, le=MAX_INT32, description="Most tokens to draw.")
    stop_sequences: Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Strings that end the text and are no part of it."
    )
    temperature: Annotated[float, Field(ge=0, le=1), AfterValidator(_temperature)] | None = Field(
        None, description="0 = greedy; absent: 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Draw from the likeliest tokens of this mass; absent: 1.")
    top_k: int | None = Field(None, ge=0, le=MAX_INT32, description="Draw from the k likeliest; 0 = from all.")
    stream: bool | None = Field(None, description="Send the text token by token, as server-sent events.")
    metadata: RequestMetadata | None = Field(None, description="Read by nobody.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="There is one.")


# -- answers -----------------------------------------------------------------------------------------------------------
class AnthropicErrorDetail(ResponseModel):
    """What is wrong."""

    type: str = Field(description="Kind of error.")
    message: str = Field(description="One sentence, with what would be accepted.")


class AnthropicErrorResponse(ResponseModel):
    """Every error of the Anthropic-compatible routes."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail = Field(description="The error.")
    request_id: str | None = Field(description="To look for in the server's log.")


class AnswerBlock(ResponseModel):
    """The text of an answer."""

    type: Literal["text"] = "text"
    text: str = Field(description="The text.")
    citations: None = None


class AnthropicUsage(ResponseModel):
    """What was used."""

    input_tokens: int = Field(description="Tokens of the prompt that were computed.")
    cache_creation_input_tokens: int = Field(0, description="Always 0: nothing is charged for caching.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that needed no computing.")
    output_tokens: int = Field(description="Tokens drawn, what stopped them included.")


class MessageResponse(ResponseModel):
    """Result of `messages`."""

    id: str = Field(description="Of this answer.")
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str = Field(description="As asked for.")
    content: list[AnswerBlock] = Field(description="What the model says.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] = Field(description="Why it ended.")
    stop_sequence: str | None = Field(description="The stop sequence that ended it.")
    usage: AnthropicUsage = Field(description="What was used.")


class TokenCount(ResponseModel):
    """Result of `messages/count_tokens`."""

    input_tokens: int = Field(description="Tokens of the prompt.")
