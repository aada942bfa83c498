"""Token sequences and tensors in JSON.

The numbers of a tensor are left as parsed (`data`): `app/codec/tensors.py` checks and converts them in bulk with numpy,
which a model per number could not do at the size of a training batch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from schemas.http.base import Items, RequestModel, ResponseModel, TokenId

_NUMBERS = {"type": "array", "items": {"type": "number"}}
_NESTED = {"type": "array", "items": {"anyOf": [{"type": "number"}, _NUMBERS]}}

NestedNumbers = Annotated[Any, WithJsonSchema(_NESTED)]


class EncodedTextChunk(RequestModel):
    """A run of token ids."""

    type: Literal["encoded_text"] = Field("encoded_text", description="Text is the only kind of chunk here.")
    tokens: Items[TokenId] = Field(description="Token ids.")

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "encoded_text") != "encoded_text":
            kind = str(value["type"])[:64]
            raise ValueError(f"this server is text-only: a chunk of type {kind!r} cannot be read, only 'encoded_text'")
        return value


class ModelInput(RequestModel):
    """The tokens that a model reads: `{"chunks": [...]}`, or a plain list of token ids."""

    chunks: Items[EncodedTextChunk] = Field(min_length=1, max_length=65536, description="Read one after the other.")

    @model_validator(mode="before")
    @classmethod
    def _plain_list(cls, value: Any) -> Any:
        return {"chunks": [{"type": "encoded_text", "tokens": value}]} if isinstance(value, list) else value

    @model_validator(mode="after")
    def _not_empty(self) -> ModelInput:
        if not any(chunk.tokens for chunk in self.chunks):
            raise ValueError("there must be at least one token")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return _or_list(
            handler(schema), handler, {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
        )


class TensorData(RequestModel):
    """A tensor: a (nested) list of numbers, or an object; sparse in CSR form if the two index lists are given."""

    data: NestedNumbers = Field(description="The numbers, flat or nested; of a sparse tensor only the listed ones.")
    dtype: Literal["float32", "int64"] | None = Field(None, description="Absent: as the input needs it.")
    shape: Annotated[Items[Annotated[int, Field(ge=0)]], Field(max_length=8)] | None = Field(
        None, description="Absent: as the list is nested. Required for a sparse tensor."
    )
    sparse_crow_indices: Items[int] | None = Field(None, description="CSR row pointers, rows + 1 of them.")
    sparse_col_indices: Items[int] | None = Field(None, description="CSR column indices, one per listed number.")

    @model_validator(mode="before")
    @classmethod
    def _plain_list(cls, value: Any) -> Any:
        return {"data": value} if isinstance(value, list) else value

    @model_validator(mode="after")
    def _csr_is_complete(self) -> TensorData:
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices belong together: give both or neither")
        if self.sparse_crow_indices is not None and self.shape is None:
            raise ValueError("a sparse tensor needs its dense shape: give shape")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return _or_list(handler(schema), handler, _NESTED)


def _or_list(schema: JsonSchemaValue, handler: GetJsonSchemaHandler, plain: JsonSchemaValue) -> JsonSchemaValue:
    """The schema of a model that also reads a plain list."""
    resolved = handler.resolve_ref_schema(schema)
    described = dict(resolved)
    resolved.clear()
    resolved.update(title=described.pop("title"), description=described.pop("description"))
    resolved["anyOf"] = [described, plain]
    return schema


JsonNumber = float | Literal["NaN", "Infinity", "-Infinity"] | None
"""A number of a result: null = not computed; the three words = not finite."""


class TensorDataResult(ResponseModel):
    """A tensor in a result; sparse (CSR) only where the request was."""

    data: list[JsonNumber] = Field(description="The numbers, row-major; of a sparse tensor only the listed ones.")
    dtype: Literal["float32", "int64"] = Field(description="Type of the numbers.")
    shape: list[int] = Field(description="Dense shape.")
    sparse_crow_indices: list[int] | None = Field(None, description="CSR row pointers.")
    sparse_col_indices: list[int] | None = Field(None, description="CSR column indices.")
