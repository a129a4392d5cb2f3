"""Old reader and new writer, new reader and old writer, for every record: with a registry and without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollstream.errors import SchemaError
from rollstream.schemas.codec import CLASSES, Catalog, Codec, newest_schema, schema_files
from rollstream.schemas.records import RECORDS
from tests.unit.schemas.next_versions import (
    ADDED,
    NAMES,
    NEW_SYMBOL,
    RULES,
    MemoryRegistry,
    Rule,
    adds_a_field,
    body_of,
    examples,
    frame_of,
    named_types,
    next_schema,
    tomorrow,
    widens_enums,
)

by_record = pytest.mark.parametrize("name", NAMES)
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
by_framing = pytest.mark.parametrize("has_registry", [False, True], ids=["single_object", "registry"])


def test_every_record_is_tried() -> None:
    """A record without an example would be left out."""
    assert sorted(RECORDS) == NAMES


@by_framing
@by_rule
@by_record
def test_new_reader_reads_what_an_old_writer_wrote(name: str, rule: Rule, has_registry: bool) -> None:
    """After an update nothing in the log has become unreadable."""
    record, registry = examples()[name], MemoryRegistry() if has_registry else None
    written = frame_of(newest_schema(name), registry) + body_of(record, newest_schema(name))

    read = Codec(registry, catalog=tomorrow(next_schema(name, rule))).decode(written)

    assert record == read


@by_rule
@by_record
def test_old_reader_reads_what_a_new_writer_wrote_if_a_registry_has_the_schema(name: str, rule: Rule) -> None:
    """What was added is passed over; the values that both know arrive."""
    record, registry, schema = examples()[name], MemoryRegistry(), next_schema(name, rule)
    written = frame_of(schema, registry) + body_of(record, schema)

    if rule.__name__ == "makes_optional":
        with pytest.raises(SchemaError):  # not promised: the value could be missing
            Codec(registry).decode(frame_of(schema, registry) + body_of(record, schema, _without_first))
        return
    assert record == Codec(registry).decode(written)


def _without_first(values: dict[str, Any]) -> None:
    values[next(iter(values))] = None


@by_record
def test_old_reader_without_a_registry_says_that_it_is_too_old(name: str) -> None:
    """The bytes are kept in a dead letter, and a reader that was updated reads them: readers first, or redrive."""
    record, schema = examples()[name], next_schema(name, adds_a_field)
    written = frame_of(schema, None) + body_of(record, schema)

    with pytest.raises(SchemaError) as caught:
        Codec().decode(written)
    read = Codec(catalog=tomorrow(schema)).decode(written)

    assert ("unknown_schema", record) == (caught.value.reason, read)


@pytest.mark.parametrize("name", [name for name in NAMES if any(named_types(next_schema(name).parsed, "enum"))])
def test_old_reader_refuses_a_value_that_it_has_no_word_for(name: str) -> None:
    """A symbol of tomorrow is `unknown_schema`: not damage, and never taken for another symbol."""
    record, registry, schema = examples()[name], MemoryRegistry(), next_schema(name, widens_enums)
    body = body_of(record, schema, _say_new_symbol(CLASSES[name]))

    with pytest.raises(SchemaError) as caught:
        Codec(registry).decode(frame_of(schema, registry) + body)

    assert "unknown_schema" == caught.value.reason
    assert NEW_SYMBOL in str(caught.value)


def _say_new_symbol(cls: type) -> Rule:
    """Puts the new symbol wherever a value of an enum stands."""

    def change(values: Any) -> None:
        for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
            if isinstance(value, dict | list):
                change(value)
            elif isinstance(value, str) and value in symbols:
                values[key] = NEW_SYMBOL

    name = next(name for name, known in CLASSES.items() if known is cls)
    symbols = {symbol for enum in named_types(newest_schema(name).parsed, "enum") for symbol in enum["symbols"]}
    return change


@by_framing
@by_record
def test_new_class_gets_the_default_of_what_an_old_writer_did_not_know(name: str, has_registry: bool) -> None:
    """And what the new program writes, the new program reads."""
    record, registry = examples()[name], MemoryRegistry() if has_registry else None
    fields = [(f.name, f.type, dataclasses.field(default=f.default)) for f in dataclasses.fields(record)]
    added = (ADDED["name"], str, dataclasses.field(default=ADDED["default"]))
    newer = dataclasses.make_dataclass(type(record).__name__, [*fields, added], frozen=True, kw_only=True)
    newer.__module__ = type(record).__module__  # where its type hints are looked up
    schema = next_schema(name, adds_a_field)
    codec = Codec(
        registry,
        catalog=Catalog({**schema_files(), (name, schema.version): schema}, {**CLASSES, name: newer}),
    )
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}

    read = codec.decode(frame_of(newest_schema(name), registry) + body_of(record, newest_schema(name)))

    assert newer(**values) == read
    later = newer(**{**values, ADDED["name"]: "as of now"})
    assert later == codec.decode(codec.encode(later))


def test_schema_of_a_registry_that_is_no_record_of_ours_is_refused() -> None:
    """Another writer's Avro schema, one that is no record, and one that is no Avro."""
    registry = MemoryRegistry()
    registry.texts = [
        '{"type": "record", "name": "Order", "namespace": "shop", "fields": []}',
        '"int"',
        "syntax = 3;",
    ]

    for schema_id in range(4):
        with pytest.raises(SchemaError) as caught:
            Codec(registry).decode(b"\x00" + schema_id.to_bytes(4, "big") + b"\x02")

        assert "unknown_schema" == caught.value.reason
