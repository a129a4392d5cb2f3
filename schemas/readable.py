"""Records as readable JSON and back: packed arrays as lists, a missing log-probability as null.

For examples, people and error messages; the wire is Avro.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import typing
from enum import StrEnum
from typing import Any, TypeVar

from rollstream.errors import SchemaError
from rollstream.schemas.derive import optional_hint
from rollstream.schemas.types import (
    Json,
    PackedFloats,
    PackedIds,
    PackedMask,
    pack_floats,
    pack_ids,
    pack_mask,
    unpack_floats,
    unpack_ids,
    unpack_mask,
)

T = TypeVar("T")


def to_readable(record: Any) -> dict[str, Any]:
    """Plain JSON values of a record."""
    hints = typing.get_type_hints(type(record))
    return {f.name: _plain(getattr(record, f.name), hints[f.name]) for f in dataclasses.fields(record)}


def from_readable(cls: type[T], values: Any, at: str = "") -> T:
    """The record behind plain JSON values.

    Raises: SchemaError: reason `bad_field`: a field is missing, unknown or of another type; the message names it.
    """
    at = at or cls.__name__
    if not isinstance(values, dict):
        raise _bad(at, values, "an object")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    for name in values:
        if name not in fields:
            raise SchemaError(
                f"cannot read {at}: unknown field {name!r}, expected {sorted(fields)}", reason="bad_field"
            )
    read: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            read[name] = _typed(values[name], hints[name], f"{at}.{name}")
        elif field.default is dataclasses.MISSING:
            raise SchemaError(f"cannot read {at}: field {name!r} is missing", reason="bad_field")
    return cls(**read)


def _plain(value: Any, hint: Any) -> Any:
    inner, _ = optional_hint(hint)
    if value is None:
        return None
    if inner is PackedIds:
        return unpack_ids(value).tolist()
    if inner is PackedFloats:
        return [None if math.isnan(v) else v for v in unpack_floats(value).tolist()]
    if inner is PackedMask:
        return unpack_mask(value).tolist()
    if inner is bytes:
        return base64.b64encode(value).decode()
    if typing.get_origin(inner) is tuple:
        return [_plain(item, typing.get_args(inner)[0]) for item in value]
    if dataclasses.is_dataclass(inner):
        return to_readable(value)
    return str(value) if isinstance(value, StrEnum) else value


def _typed(value: Any, hint: Any, at: str) -> Any:
    inner, is_optional = optional_hint(hint)
    if value is None and is_optional:
        return None
    if inner in (PackedIds, PackedFloats, PackedMask) or typing.get_origin(inner) is tuple:
        if not isinstance(value, list):
            raise _bad(at, value, "a list")
        if inner is PackedIds:
            return pack_ids(value)
        if inner is PackedFloats:
            return pack_floats([math.nan if v is None else v for v in value])
        if inner is PackedMask:
            return pack_mask(value)
        item = typing.get_args(inner)[0]
        return tuple(_typed(v, item, f"{at}[{i}]") for i, v in enumerate(value))
    if dataclasses.is_dataclass(inner):
        return from_readable(typing.cast(Any, inner), value, at)
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        try:
            return inner(value)
        except ValueError:
            raise _bad(at, value, f"one of {[m.value for m in inner]}") from None
    if inner is float and type(value) in (int, float):
        return float(value)
    if inner is bytes and isinstance(value, str):
        return base64.b64decode(value)
    plain = str if inner is Json else inner
    if type(value) is not plain:
        raise _bad(at, value, plain.__name__)
    return value


def _bad(at: str, value: Any, expected: str) -> SchemaError:
    return SchemaError(f"cannot read {at}: got {value!r}, expected {expected}", reason="bad_field")
