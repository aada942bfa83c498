"""Bodies of `tokenize`: texts and chats as the token ids that a model reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from schemas.http.base import Items, RequestModel, ResponseModel
from schemas.http.openai import ModelName

MAX_ITEMS = 64
MAX_CHARACTERS = 200_000

Text = Annotated[str, StringConstraints(max_length=MAX_CHARACTERS)]


class TokenizeMessage(RequestModel):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: Text = Field(description="What is said.")


class TokenizeItem(RequestModel):
    """A prompt, as a text or as a chat, and what follows it."""

    prompt: Text | None = Field(None, description="A text; what the tokenizer puts before every text is added.")
    messages: Annotated[Items[TokenizeMessage], Field(min_length=1, max_length=1000)] | None = Field(
        None, description="A chat, which the model's template makes a prompt of that asks for the next answer."
    )
    completion: Text | None = Field(None, description="A text that follows; its tokens are its own.")

    @model_validator(mode="after")
    def _one_prompt(self) -> TokenizeItem:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt (a text) or messages (a chat), one of them")
        return self


class TokenizeRequest(RequestModel):
    """Body of `tokenize`."""

    model: ModelName = Field(description="A base model, or a checkpoint: tinker://...")
    items: Annotated[Items[TokenizeItem], Field(min_length=1, max_length=MAX_ITEMS)] = Field(description="The texts.")


class TokenizedItem(ResponseModel):
    """The token ids of one item."""

    prompt_tokens: list[int] = Field(description="Of the prompt.")
    completion_tokens: list[int] = Field(description="Of the completion; empty without one.")


class TokenizeResponse(ResponseModel):
    """Result of `tokenize`."""

    items: list[TokenizedItem] = Field(description="In order.")
