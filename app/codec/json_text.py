"""JSON text to values and models, strictly: one value per key, exact integers, no NaN, no broken Unicode."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import numpy as np
import orjson
from pydantic import ValidationError

from app.errors import validation_error
from schemas.errors import InvalidRequest
from schemas.http.base import RequestModel

M = TypeVar("M", bound=RequestModel)

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"(\s*+:)?', re.DOTALL)
MAX_QUOTES = 1_000_000
"""Quotation marks in one text: twenty times what the largest honest batch needs; each string costs time here."""
MAX_KEYS = 1024
"""Keys of one object: far more than any request has. Each unknown key costs an error message."""
_EXACT_DIGITS = 18
"""An integer of so many digits fits into 64 bits."""
_TOO_MANY_KEYS = f"an object holds more than {MAX_KEYS} keys"


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    orjson does the work; the slow exact parser only runs if the text holds an integer that orjson would round, or
    seems to repeat a key.

    Raises:
        InvalidRequest: not JSON in UTF-8, NaN or an infinite number, nested too deeply, a key given twice,
            too many strings, too many keys in one object.
    """
    if body.count(b'"') > MAX_QUOTES:
        raise InvalidRequest(f"the body holds more than {MAX_QUOTES // 2} strings", code="invalid_json")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    repeats = _keys_in_text(body) != _keys_in_value(value)
    return _parse_exactly(body) if repeats or _longest_run_of_digits(body) > _EXACT_DIGITS else value


def parse_request(body: bytes, model: type[M]) -> M:
    """The model of a JSON body. Raises InvalidRequest that names each wrong field, its value and what is accepted."""
    try:
        return model.model_validate(parse_json(body))
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), model) from None


def canonical_json(value: Any) -> bytes:
    """The one text of a value: keys sorted, no blanks, ASCII. NaN and infinity raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _parse_exactly(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: it is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(_TOO_MANY_KEYS)
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated[:64]!r} is given twice in one object")
    return found


def _longest_run_of_digits(body: bytes) -> int:
    """In bulk: the widest gap between two bytes that are no digits."""
    codes = np.frombuffer(body, np.uint8)
    breaks = np.flatnonzero((codes < ord("0")) | (codes > ord("9")))
    if breaks.size == 0:
        return len(body)
    return int(max(breaks[0], len(body) - 1 - breaks[-1], np.diff(breaks).max(initial=0) - 1))


def _keys_in_text(body: bytes) -> int:
    return sum(1 for match in _STRING.finditer(body) if match.group(1))


def _keys_in_value(value: Any) -> int:
    """Counts keys without looking at every number: of a list that begins with a number, nothing is visited (if that
    misses a key, the exact parser decides)."""
    count, open_nodes = 0, [value]
    while open_nodes:
        node = open_nodes.pop()
        children: Any = ()
        if isinstance(node, dict):
            if len(node) > MAX_KEYS:
                raise InvalidRequest(f"the body is refused: {_TOO_MANY_KEYS}", code="invalid_json")
            count += len(node)
            children = node.values()
        elif isinstance(node, list) and node and isinstance(node[0], dict | list):
            children = node
        open_nodes.extend(child for child in children if isinstance(child, dict | list))
    return count
