"""Tensors of the wire (dense bytes, CSR bytes, JSON numbers) to dense numpy arrays.

Every property that the conversion relies on is checked here first, above all those of CSR: nothing is handed to a
sparse library, and a claimed size is bounded before anything is allocated. Not responsible for what a loss wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InvalidRequest
from schemas.http.tensors import TensorData
from schemas.proto import tinker_public_pb2 as pb

Numbers = NDArray[np.float32] | NDArray[np.int64]

_PROTO_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_MAX_DIMS = 2


@dataclass(slots=True)
class CellBudget:
    """How many numbers the dense tensors of one request may still hold."""

    left: int

    def take(self, cells: int, field: str) -> None:
        """Raises InvalidRequest if there is no room for so many."""
        if cells > self.left:
            raise InvalidRequest(
                f"{field} would hold {cells} numbers, but this request has room for {self.left} more",
                field=field,
                hint="send the examples in smaller batches",
            )
        self.left -= cells


def tensor_from_proto(tensor: pb.Tensor, field: str, budget: CellBudget, *, unlisted: int = 0) -> Numbers:
    """Dense, writable float32 or int64 array of the tensor's shape (no shape = 1-D).

    Args:
        unlisted: value of the cells that a CSR tensor does not list.

    Raises:
        InvalidRequest: bytes do not fit shape and dtype, an unknown dtype, a broken CSR invariant, too large.
    """
    dtype = _PROTO_DTYPES.get(tensor.dtype)
    if dtype is None:
        name = pb.DType.Name(tensor.dtype) if tensor.dtype in pb.DType.values() else str(tensor.dtype)
        raise InvalidRequest(
            f"{field} has dtype {name}; accepted: DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32", field=field
        )
    encoding = tensor.WhichOneof("encoding")
    if encoding == "sparse_csr":
        csr = tensor.sparse_csr
        return csr_to_dense(
            _unpack(csr.values, dtype, field, "values"),
            _unpack(csr.crow_indices, np.dtype("<i8"), field, "crow_indices"),
            _unpack(csr.col_indices, np.dtype("<i8"), field, "col_indices"),
            list(tensor.shape),
            field,
            budget,
            unlisted=unlisted,
        )
    if encoding is None:
        raise InvalidRequest(f"{field} has no values: give dense or sparse_csr", field=field)
    values = _unpack(tensor.dense, dtype, field, "dense")
    budget.take(values.size, field)
    return _shaped(_widened(values), list(tensor.shape) or None, field)


def tensor_from_json(tensor: TensorData, field: str, budget: CellBudget, *, unlisted: int = 0) -> Numbers:
    """The same for the JSON form: numbers flat or nested once, or CSR. Raises InvalidRequest likewise."""
    values, nested_shape = _numbers(tensor.data, field)
    if tensor.dtype == "int64" and values.dtype != np.int64:
        raise InvalidRequest(f"{field} has dtype int64, but its data holds fractions", field=field)
    if tensor.dtype == "float32":
        values = values.astype(np.float32)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        budget.take(values.size, field)
        if tensor.shape is not None and len(nested_shape) > 1 and tensor.shape != nested_shape:
            raise InvalidRequest(f"{field} has shape {tensor.shape}, but its data has {nested_shape}", field=field)
        return _shaped(values, tensor.shape or nested_shape, field)
    if len(nested_shape) > 1:
        raise InvalidRequest(f"{field} is sparse, so its data must be a flat list", field=field)
    crow, _ = _numbers(tensor.sparse_crow_indices, field)
    col, _ = _numbers(tensor.sparse_col_indices, field)
    return csr_to_dense(
        values, crow.astype(np.int64), col.astype(np.int64), tensor.shape or [], field, budget, unlisted=unlisted
    )


def csr_to_dense(
    values: NDArray[Any],
    crow: NDArray[np.int64],
    col: NDArray[np.int64],
    shape: Sequence[int],
    field: str,
    budget: CellBudget,
    *,
    unlisted: int = 0,
) -> Numbers:
    """Dense [rows, cols] array of a CSR tensor whose every invariant holds.

    Raises:
        InvalidRequest: shape is not 2-D; `crow` is not rows+1 long, does not begin at 0, falls, or does not end at
            the number of values; `col` is not as long as the values, leaves the columns, or does not rise in a row.
    """

    def refuse(what: str) -> InvalidRequest:
        return InvalidRequest(f"{field} is not a valid CSR tensor: {what}", field=field)

    if len(shape) != 2 or min(shape) < 1:
        raise refuse(f"its shape is {_show(shape)}, but must be [rows, columns], both at least 1")
    rows, cols = (int(dim) for dim in shape)
    if crow.size != rows + 1:
        raise refuse(f"crow_indices has {crow.size} entries, but {rows} rows need {rows + 1}")
    if crow[0] != 0 or crow[-1] != values.size or col.size != values.size:
        raise refuse(
            f"crow_indices must run from 0 to the number of values ({values.size}), with one column index each; "
            f"it runs from {crow[0]} to {crow[-1]}, with {col.size} column indices"
        )
    if np.any(crow[1:] < crow[:-1]):
        raise refuse("crow_indices must not fall")
    if col.size and (col.min() < 0 or col.max() >= cols):
        raise refuse(f"column indices must be 0 to {cols - 1}; they are {col.min()} to {col.max()}")
    row_of = np.repeat(np.arange(rows), np.diff(crow))
    if np.any((col[1:] <= col[:-1]) & (row_of[1:] == row_of[:-1])):
        raise refuse("column indices must rise within a row")
    budget.take(rows * cols, field)
    listed = _widened(values)
    dense = np.full((rows, cols), unlisted, dtype=listed.dtype)
    dense[row_of, col] = listed
    return dense


def _unpack(data: bytes, dtype: np.dtype[Any], field: str, part: str) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(
            f"{field}.{part} has {len(data)} bytes, which is no multiple of the {dtype.itemsize} of {dtype.name}",
            field=field,
        )
    return np.frombuffer(data, dtype)


def _widened(values: NDArray[Any]) -> Numbers:
    """A writable copy in the machine's byte order: int32 becomes int64, floats become float32."""
    if values.dtype.kind == "i":
        return values.astype(np.int64)
    return to_float32(values, copy=True)


def to_float32(values: NDArray[Any], *, copy: bool) -> NDArray[np.float32]:
    """What float32 cannot hold becomes infinite without a warning: it is refused by name later."""
    if values.dtype.itemsize <= 4:
        return values.astype(np.float32, copy=copy)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _shaped(values: Numbers, shape: list[int] | None, field: str) -> Numbers:
    if shape is None:
        return values
    if len(shape) > _MAX_DIMS or min(shape) < 0 or max(shape) > values.size or prod(shape) != values.size:
        raise InvalidRequest(
            f"{field} has shape {_show(shape)}, which does not fit its {values.size} numbers "
            f"(accepted: [N] or [N, K] that multiply to it)",
            field=field,
        )
    return values.reshape(shape)


def _numbers(data: Any, field: str) -> tuple[NDArray[Any], list[int]]:
    """A flat int64 or float64 array and the shape of the (nested) list that it came from."""
    if not isinstance(data, list):
        raise InvalidRequest(f"{field} must be a list of numbers, not {_kind(type(data))}", field=field)
    shape = [len(data)]
    flat = data
    if data and isinstance(data[0], list):
        lengths = {len(row) if isinstance(row, list) else -1 for row in data}
        if len(lengths) != 1 or -1 in lengths:
            raise InvalidRequest(f"{field} is a ragged list: all its rows must be lists of one length", field=field)
        shape.append(len(data[0]))
        flat = list(chain.from_iterable(data))
    kinds = set(map(type, flat))
    if not kinds <= {int, float}:
        wrong = ", ".join(sorted(_kind(kind) for kind in kinds - {int, float}))
        raise InvalidRequest(
            f"{field} must hold numbers in at most {_MAX_DIMS} dimensions; it holds {wrong}", field=field
        )
    try:
        return np.array(flat, dtype=np.int64 if float not in kinds else np.float64), shape
    except OverflowError:
        raise InvalidRequest(f"{field} holds an integer beyond 64 bits", field=field) from None


_KINDS: dict[type, str] = {bool: "true/false", str: "text", list: "a list", dict: "an object", type(None): "null"}


def _kind(kind: type) -> str:
    return _KINDS.get(kind, "a number")


def _show(shape: Sequence[int]) -> str:
    """A shape in a message, however long a client made it."""
    return str([int(dim) for dim in shape[:8]])
