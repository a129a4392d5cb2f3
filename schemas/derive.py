"""Avro schemas and converters derived from the record classes.

The `.avsc` files are the contract; the classes are how Python sees it. `derive_schema` says what a class's schema is, so
that a test can hold file and class together, and `converters` makes the fast functions between instances and the plain
dicts that fastavro reads and writes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from rollstream.schemas.types import Json, PackedFloats, PackedIds, PackedMask

NAMESPACE = "rollstream"

_PLAIN: dict[Any, Any] = {
    str: "string",
    int: "long",
    float: "double",
    bool: "boolean",
    bytes: "bytes",
    Json: {"type": "string", "logicalType": "json"},
    PackedIds: {"type": "bytes", "logicalType": "packed-u32"},
    PackedFloats: {"type": "bytes", "logicalType": "packed-f32"},
    PackedMask: {"type": "bytes", "logicalType": "packed-u8"},
}

Converter = Callable[[Any], Any]


def derive_schema(cls: type) -> dict[str, Any]:
    """The Avro schema of a record class, named types written out where they first occur."""
    return typing.cast(dict[str, Any], _record_schema(cls, set()))


def field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field or enum value of a class, by name."""
    return _field_docs(cls)


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    name: str | None = None
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            docs[name] = inspect.cleandoc(str(statement.value.value))
            name = None
    return docs


def converters(cls: type) -> tuple[Converter, Converter]:
    """Two functions for a record class: instance → dict that fastavro writes, dict that fastavro read → instance."""
    return _converters(cls)


@functools.cache
def _converters(cls: type) -> tuple[Converter, Converter]:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    to_dict = [(name, _conversion(hints[name], 0)) for name in names]
    from_dict = [(name, _conversion(hints[name], 1)) for name in names]

    def write(record: Any) -> dict[str, Any]:
        return {name: getattr(record, name) if f is None else f(getattr(record, name)) for name, f in to_dict}

    def read(values: dict[str, Any]) -> Any:
        return cls(**{name: values[name] if f is None else f(values[name]) for name, f in from_dict})

    return write, read


def _conversion(hint: Any, direction: int) -> Converter | None:
    """What turns a field's value into its plain form (direction 0) or back (1); None if nothing has to be done."""
    inner, is_optional = optional_hint(hint)
    f: Converter | None
    if typing.get_origin(inner) is tuple:
        item = _conversion(typing.get_args(inner)[0], direction)
        if direction == 0:
            f = list if item is None else lambda values: [item(v) for v in values]
        else:
            f = tuple if item is None else lambda values: tuple([item(v) for v in values])
    elif dataclasses.is_dataclass(inner):
        f = converters(typing.cast(type, inner))[direction]
    elif isinstance(inner, type) and issubclass(inner, StrEnum):
        f = str if direction == 0 else inner
    else:
        return None
    if not is_optional:
        return f
    convert = f
    return lambda value: None if value is None else convert(value)


def _record_schema(cls: type, seen: set[str]) -> Any:
    if cls.__name__ in seen:
        return f"{NAMESPACE}.{cls.__name__}"
    seen.add(cls.__name__)
    hints = typing.get_type_hints(cls)
    docs = field_docs(cls)
    fields = []
    for field in dataclasses.fields(cls):
        entry: dict[str, Any] = {
            "name": field.name,
            "doc": docs.get(field.name, ""),
            "type": _type_schema(hints[field.name], seen),
        }
        if field.default is not dataclasses.MISSING:
            default = field.default
            entry["default"] = _json_default(default)
        fields.append(entry)
    return {
        "type": "record",
        "name": cls.__name__,
        "namespace": NAMESPACE,
        "doc": inspect.getdoc(cls) or "",
        "fields": fields,
    }


def _json_default(default: Any) -> Any:
    """A field's default as a schema file says it. Source: Avro 1.12, bytes are text whose code points are the bytes."""
    if isinstance(default, bytes):
        return default.decode("latin-1")
    return list(default) if isinstance(default, tuple) else default


def _type_schema(hint: Any, seen: set[str]) -> Any:
    inner, is_optional = optional_hint(hint)
    if is_optional:
        return ["null", _type_schema(inner, seen)]
    if inner in _PLAIN:
        return _PLAIN[inner]
    if typing.get_origin(inner) is tuple:
        return {"type": "array", "items": _type_schema(typing.get_args(inner)[0], seen)}
    if dataclasses.is_dataclass(inner):
        return _record_schema(typing.cast(type, inner), seen)
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        name = f"{NAMESPACE}.{inner.__name__}"
        if inner.__name__ in seen:
            return name
        seen.add(inner.__name__)
        docs = field_docs(inner)
        values = "; ".join(f"{member.value}: {docs.get(member.name, '')}" for member in inner)
        return {
            "type": "enum",
            "name": inner.__name__,
            "namespace": NAMESPACE,
            "doc": f"{inspect.getdoc(inner)} {values}",
            "symbols": [member.value for member in inner],
        }
    raise TypeError(f"no Avro type for {hint!r}")


def optional_hint(hint: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether it had it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        if len(inner) == 1 and len(typing.get_args(hint)) == 2:
            return inner[0], True
        raise TypeError(f"a record field may be one type or that type and None, got {hint!r}")
    return hint, False
