"""What a coming release could do to a schema, as rules that apply to any record; and a registry that knows both releases."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import fastavro

from rollstream.errors import SchemaError
from rollstream.schemas.codec import (
    CLASSES,
    Catalog,
    SchemaFile,
    newest_schema,
    read_schema,
    record_name,
    schema_files,
)
from rollstream.schemas.derive import converters
from rollstream.schemas.readable import from_readable
from rollstream.schemas.records import Record
from rollstream.schemas.records.claims import ClaimCheck
from tests.contract.checkout import ROOT

ADDED = {"name": "added_later", "type": "string", "default": "as before"}
NEW_SYMBOL = "of_tomorrow"

Rule = Callable[[dict[str, Any]], None]


def adds_a_field(schema: dict[str, Any]) -> None:
    """A field with a default."""
    schema["fields"].append(ADDED)


def adds_a_field_in_front(schema: dict[str, Any]) -> None:
    """The same, where every later byte moves."""
    schema["fields"].insert(0, ADDED)


def adds_a_field_within(schema: dict[str, Any]) -> None:
    """A field with a default, in each record inside the record."""
    for inner in named_types(schema, "record"):
        if inner is not schema:
            inner["fields"].append(ADDED)


def widens_enums(schema: dict[str, Any]) -> None:
    """A symbol more, in front, and a default for readers that come later still."""
    for enum in named_types(schema, "enum"):
        enum["default"] = enum["symbols"][-1]
        enum["symbols"].insert(0, NEW_SYMBOL)


def makes_optional(schema: dict[str, Any]) -> None:
    """The first field may be missing."""
    schema["fields"][0]["type"] = ["null", schema["fields"][0]["type"]]


RULES: tuple[Rule, ...] = (adds_a_field, adds_a_field_in_front, adds_a_field_within, widens_enums, makes_optional)


def named_types(schema: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Every record or enum that is defined in a schema."""
    if isinstance(schema, list):
        for branch in schema:
            yield from named_types(branch, kind)
    elif isinstance(schema, dict):
        if schema["type"] == kind:
            yield schema
        for part in [field["type"] for field in schema.get("fields", [])] + [schema.get("items")]:
            yield from named_types(part, kind)


def next_schema(record: str, *rules: Rule) -> SchemaFile:
    """The version after the newest one."""
    newest = newest_schema(record)
    raw = copy.deepcopy(json.loads(newest.text))
    for rule in rules:
        rule(raw)
    return read_schema(record, newest.version + 1, json.dumps(raw))


def tomorrow(schema: SchemaFile) -> Catalog:
    """What a program knows that has a schema beside the released ones."""
    return Catalog({**schema_files(), (schema.record, schema.version): schema}, CLASSES)


def examples() -> dict[str, Record]:
    """One passing example of every record that stands in a topic."""
    found: dict[str, Record] = {}
    for path in sorted((ROOT / "schemas" / "examples").rglob("*.pass.json")):
        case = json.loads(path.read_text("utf-8"))
        record = from_readable(CLASSES[case["record"]], case["value"])
        if not isinstance(record, ClaimCheck):
            found.setdefault(case["record"], record)
    return found


def body_of(record: Record, schema: SchemaFile, change: Rule | None = None) -> bytes:
    """A record as a writer with another schema writes it. Args: change: of the values that are written."""
    values = converters(type(record))[0](record)
    if change is not None:
        change(values)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema.parsed, values)
    return out.getvalue()


def frame_of(schema: SchemaFile, registry: MemoryRegistry | None) -> bytes:
    """What stands before the body."""
    if registry is None:
        return b"\xc3\x01" + schema.fingerprint
    return b"\x00" + registry.schema_id(schema).to_bytes(4, "big")


class MemoryRegistry:
    """Gives every schema that it is asked for an id."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """By id."""

    def schema_id(self, schema: SchemaFile) -> int:
        if schema.text not in self.texts:
            self.texts.append(schema.text)
        return self.texts.index(schema.text)

    def schema_text(self, schema_id: int) -> str:
        if schema_id >= len(self.texts):
            raise SchemaError(f"no schema {schema_id}", reason="unknown_schema")
        return self.texts[schema_id]


NAMES = sorted(examples())
"""Names of all records."""
assert {record_name(type(record)) for record in examples().values()} == set(NAMES)
