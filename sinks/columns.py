"""Columns of records: Arrow arrays from record fields, and back without loss.

The Arrow type follows from the field's Python type: packed ids are lists of uint32, packed floats of float32, a mask of
uint8, a tuple of records a list of structs. Packed bytes become the array's buffer as they are; no item is touched.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from rollstream.errors import SinkError
from rollstream.schemas.derive import optional_hint
from rollstream.schemas.types import Json, PackedFloats, PackedIds, PackedMask

_PACKED: dict[Any, tuple[str, Any]] = {
    PackedIds: ("<u4", pa.uint32()),
    PackedFloats: ("<f4", pa.float32()),
    PackedMask: ("u1", pa.uint8()),
}
_PLAIN: dict[Any, Any] = {
    str: pa.string(),
    Json: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


def arrow_type(hint: Any) -> pa.DataType:
    """The Arrow type of a field's type.

    Raises: TypeError: the type is none that a record may have.
    """
    inner, _ = optional_hint(hint)
    if inner in _PACKED:
        return pa.list_(_PACKED[inner][1])
    if inner in _PLAIN:
        return _PLAIN[inner]
    if typing.get_origin(inner) is tuple:
        return pa.list_(arrow_type(typing.get_args(inner)[0]))
    if dataclasses.is_dataclass(inner):
        return pa.struct([pa.field(name, arrow_type(kind)) for name, kind in field_hints(typing.cast(type, inner))])
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        return pa.string()
    raise TypeError(f"no Arrow type for {hint!r}")


def field_hints(cls: type) -> tuple[tuple[str, Any], ...]:
    """Names and types of a record's fields, in order."""
    return _field_hints(typing.cast(Any, cls))


@functools.cache
def _field_hints(cls: Any) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(cls))


def to_arrow(hint: Any, values: Sequence[Any]) -> pa.Array:
    """A column from a field's values."""
    inner, _ = optional_hint(hint)
    if inner in _PACKED:
        return _packed_column(inner, values)
    if typing.get_origin(inner) is tuple:
        item = typing.get_args(inner)[0]
        items = to_arrow(item, list(itertools.chain.from_iterable(values)))
        return pa.ListArray.from_arrays(_offsets(values, 1), items)
    if dataclasses.is_dataclass(inner):
        return _struct_column(typing.cast(type, inner), values)
    return pa.array(values, arrow_type(inner))


def broken_array(record: Any) -> str | None:
    """Name of a packed array in the record whose bytes are not whole items; None if all are.

    Such bytes would shift every row after them in a column.
    """
    cls: Any = type(record)
    for name, kind in _array_fields(cls):
        value = getattr(record, name)
        if value is None:
            continue
        if isinstance(kind, int):
            if len(value) % kind:
                return name
        else:
            for item in value if isinstance(value, tuple) else (value,):
                inner = broken_array(item)
                if inner:
                    return f"{name}.{inner}"
    return None


def from_arrow(hint: Any, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """A field's values from a column.

    Raises: SinkError: an enum field holds a value it cannot have.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    inner, _ = optional_hint(hint)
    if inner in _PACKED:
        return _packed_values(inner, column)
    if typing.get_origin(inner) is tuple:
        items = from_arrow(typing.get_args(inner)[0], column.flatten())
        ends = np.cumsum([0, *_lengths(column)]).tolist()
        return [tuple(items[a:b]) for a, b in itertools.pairwise(ends)]
    if dataclasses.is_dataclass(inner):
        fields = field_hints(typing.cast(type, inner))
        parts = [from_arrow(kind, column.field(name)) for name, kind in fields]
        make = typing.cast(Callable[..., Any], inner)
        return [make(*row) for row in zip(*parts, strict=True)]
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        texts = column.cast(pa.string()).to_pylist()
        return [None if value is None else _member(inner, value) for value in texts]
    return typing.cast(list[Any], column.cast(arrow_type(inner)).to_pylist())


@functools.cache
def _array_fields(cls: type) -> tuple[tuple[str, int | type], ...]:
    """Fields with packed arrays (and the bytes of an item), and fields with records that have such (and their class)."""
    found: list[tuple[str, int | type]] = []
    for name, hint in field_hints(cls):
        inner, _ = optional_hint(hint)
        if inner in _PACKED:
            found.append((name, np.dtype(_PACKED[inner][0]).itemsize))
        inner = typing.get_args(inner)[0] if typing.get_origin(inner) is tuple else inner
        if dataclasses.is_dataclass(inner) and _array_fields(typing.cast(type, inner)):
            found.append((name, typing.cast(type, inner)))
    return tuple(found)


def _packed_column(inner: Any, values: Sequence[bytes]) -> pa.Array:
    dtype, kind = _PACKED[inner]
    items = pa.Array.from_buffers(kind, 0, [None, pa.py_buffer(b"")])
    data = b"".join(values)
    size = np.dtype(dtype).itemsize
    if data:
        items = pa.Array.from_buffers(kind, len(data) // size, [None, pa.py_buffer(data)])
    return pa.ListArray.from_arrays(_offsets(values, size), items)


def _packed_values(inner: Any, column: pa.Array) -> list[bytes]:
    dtype, kind = _PACKED[inner]
    items = column.flatten().cast(kind)
    data = np.asarray(items.to_numpy(zero_copy_only=False), dtype=dtype).tobytes()
    ends = (np.cumsum([0, *_lengths(column)]) * np.dtype(dtype).itemsize).tolist()
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def _struct_column(cls: type, values: Sequence[Any]) -> pa.Array:
    names = [pa.field(name, arrow_type(kind)) for name, kind in field_hints(cls)]
    columns = [to_arrow(kind, [getattr(value, name) for value in values]) for name, kind in field_hints(cls)]
    return pa.StructArray.from_arrays(columns, fields=names)


def _offsets(values: Sequence[Any], size: int) -> pa.Array:
    lengths = np.fromiter((len(value) for value in values), dtype=np.int64, count=len(values))
    ends = np.concatenate([[0], np.cumsum(lengths // size)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise SinkError(
            f"cannot make a column of {ends[-1]} items, expected fewer than 2**31; lower sink.chunk_records"
        )
    return pa.array(ends.astype(np.int32))


def _lengths(column: pa.Array) -> list[int]:
    return typing.cast(list[int], column.value_lengths().fill_null(0).to_pylist())


def _member(kind: type[StrEnum], value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise SinkError(
            f"cannot read a stored row: {value!r} is no {kind.__name__}, expected one of {[m.value for m in kind]}; the "
            "row was changed or written by a newer version",
            reason="bad_row",
        ) from None
