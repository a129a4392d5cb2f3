"""Tables: every record has one, statements and columns agree, rows come back as they went in."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from clickhouse_connect.driver.client import Client

from rollstream.schemas.records import RECORDS, CallStarted, ModelCall, Sample
from rollstream.schemas.types import PackedFloats, PackedIds, pack_floats, unpack_floats
from rollstream.sinks.base import Source
from rollstream.sinks.columns import broken_array, from_arrow, to_arrow
from rollstream.sinks.connect import ddl_files, migrate_tables, statements
from rollstream.sinks.decode import Decoded
from rollstream.sinks.tables import META, TABLES, Placed, columns_of, from_table, table_of, table_schema, to_table
from tests.unit.sinks.chain import Log

NOT_FROM_RECORDS = {"_stored_at"}


def test_every_record_but_the_marker_of_nothing_has_a_table() -> None:
    """A record type without a table would be lost."""
    tables = {table_of(record).name for record in RECORDS.values()}

    assert set(TABLES) == tables


def test_ddl_has_exactly_the_columns_of_the_rows(client: Client) -> None:
    """The statements are written by hand; the rows follow from the record classes."""
    wrong: dict[str, object] = {}

    for name, table in TABLES.items():
        described = {row[0]: row[1] for row in client.query(f"DESCRIBE TABLE {name}").result_rows}
        wanted = {field.name: field.type for field in table_schema(table)}
        if set(wanted) != set(described) - NOT_FROM_RECORDS:
            wrong[name] = set(wanted) ^ (set(described) - NOT_FROM_RECORDS)
        wrong |= {
            f"{name}.{column}": (kind, described[column])
            for column, kind in wanted.items()
            if not _fits(kind, described.get(column, ""))
        }

    assert {} == wrong


def _fits(kind: pa.DataType, described: str) -> bool:
    text = described
    for wrapper in ("LowCardinality(", "Nullable("):
        if text.startswith(wrapper):
            text = text[len(wrapper) : -1]
    if pa.types.is_list(kind):
        return text.startswith("Array(") and _fits(kind.value_type, text[len("Array(") : -1])
    if pa.types.is_struct(kind):
        return text.startswith("Tuple(") and all(f"{kind.field(i).name} " in text for i in range(kind.num_fields))
    names: dict[Any, str] = {
        pa.string(): "String",
        pa.binary(): "String",
        pa.int64(): "Int64",
        pa.int32(): "Int32",
        pa.uint32(): "UInt32",
        pa.uint8(): "UInt8",
        pa.float32(): "Float32",
        pa.float64(): "Float64",
        pa.bool_(): "Bool",
    }
    return text == names.get(kind, "DateTime64(3, 'UTC')")


@pytest.mark.parametrize("name", [name for name in TABLES if name not in ("consumptions",)])
def test_rows_survive_the_arrow_table(log: Log, name: str) -> None:
    """What `audit` rebuilds is what the sink was given, bit for bit, NaN included."""
    table = TABLES[name]
    records = [r for records in log.records.values() for r in records if isinstance(r, table.record)]
    rows = [row for record in records for row in table.rows(record)]
    placed = [Placed(row, Source("t", 0), Decoded(i, records[0], "00")) for i, row in enumerate(rows)]

    back = from_table(table.row, to_table(table, placed))

    assert rows
    assert rows == back


def test_column_names_are_unique_and_none_is_a_meta_column() -> None:
    """Flattening never makes two columns of one name."""
    for table in TABLES.values():
        names = [name for name, _, _ in columns_of(table.row)] + [name for name, _ in META]

        assert len(set(names)) == len(names), table.name


def test_packed_column_holds_empty_and_missing_values() -> None:
    """An empty array is an empty list; NaN stays NaN."""
    values = [pack_floats([]), pack_floats([math.nan, 1.5]), pack_floats([])]

    column = to_arrow(PackedFloats, values)

    assert [0, 2, 0] == column.value_lengths().to_pylist()
    assert values == from_arrow(PackedFloats, column)
    assert math.isnan(unpack_floats(from_arrow(PackedFloats, column)[1])[0])


def test_sliced_column_reads_its_own_items() -> None:
    """A slice of a list column keeps its offsets straight."""
    column = to_arrow(PackedIds, [b"\1\0\0\0", b"\2\0\0\0\3\0\0\0", b"\4\0\0\0"])

    assert [b"\2\0\0\0\3\0\0\0", b"\4\0\0\0"] == from_arrow(PackedIds, column.slice(1))


def test_array_of_broken_bytes_is_named(log: Log) -> None:
    """Five bytes are no ids; they would shift every row after them."""
    call = next(record for record in log.records["calls"] if isinstance(record, ModelCall))
    sample = next(record for record in log.records["samples"] if isinstance(record, Sample))
    from dataclasses import replace

    bad_call = replace(call, prompt=replace(call.prompt, suffix=PackedIds(b"12345")))
    bad_sample = replace(sample, logprobs=PackedFloats(b"123"))

    assert broken_array(bad_call) == "prompt.suffix"
    assert broken_array(bad_sample) == "logprobs"
    assert broken_array(call) is None


def test_migrations_run_once_and_are_numbered_without_a_gap(client: Client) -> None:
    """Forward only: what ran is never run again."""
    again = migrate_tables(client)

    assert [] == again
    assert [number for number, _, _ in ddl_files()] == list(range(1, len(ddl_files()) + 1))


def test_statements_are_split_at_line_ends_only() -> None:
    """A semicolon inside a line does not end a statement; comment lines are left out."""
    found = statements("-- why\nCREATE a ';' b\n;\nCREATE c;\n")

    assert ["CREATE a ';' b", "CREATE c"] == found


def test_started_call_is_placed_by_topic_partition_and_offset(log: Log) -> None:
    """Each row says where its record stands."""
    call = next(record for record in log.records["calls"] if isinstance(record, CallStarted))

    table = to_table(TABLES["call_starts"], [Placed(call, Source("t.calls.v1", 4), Decoded(17, call, "ab"))])

    row = table.to_pylist()[0]
    assert ("t.calls.v1", 4, 17, "ab") == (row["_topic"], row["_partition"], row["_offset"], row["_digest"])
    assert row["_time"].timestamp() * 1000 == call.started_at_ms
