"""The ClickHouse sink: nothing lost, nothing counted twice, whatever is repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError, OperationalError

from rollstream.errors import SettingsError, SinkError
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import Consumption
from rollstream.sinks.base import Chunk, LogRecord, SinkBusy, Source
from rollstream.sinks.clickhouse import ClickHouseSink, chunks_token
from rollstream.sinks.connect import connect
from rollstream.sinks.tables import TABLES
from tests.unit.sinks.chain import CODEC, Log

COUNTED = [*TABLES, "ingest_ledger"]


def _counts(client: Client, *, final: bool = True) -> dict[str, int]:
    return {
        name: client.query(f"SELECT count() FROM {name} {'FINAL' if final else ''}").result_rows[0][0]
        for name in TABLES
    }


def test_every_record_becomes_its_rows(client: Client, log: Log) -> None:
    """Rows are counted from the records, terminals only where they come from their own topic."""
    ClickHouseSink(client).write(log.chunks())

    expected = dict.fromkeys(TABLES, 0)
    for noun, records in log.records.items():
        for record in records:
            table = next(t for t in TABLES.values() if t.record is type(record))
            expected[table.name] += (
                len(list(table.rows(record))) if noun == "terminals" or table.name != "terminals" else 0
            )
    assert expected == _counts(client)


def test_same_chunks_twice_are_the_same_rows(client: Client, log: Log) -> None:
    """An insert whose answer got lost is sent again with the same token, and ClickHouse drops it: no FINAL needed."""
    sink = ClickHouseSink(client)
    sink.write(log.chunks())
    once = _counts(client, final=False)

    sink.write(log.chunks())

    assert once == _counts(client, final=False)


def test_other_cuts_are_the_same_rows(client: Client, log: Log) -> None:
    """A restart may cut the log elsewhere; identities and bytes decide."""
    sink = ClickHouseSink(client)
    sink.write(log.chunks())
    once = _counts(client)

    for chunk in log.chunks(7):
        sink.write([chunk])

    assert once == _counts(client)


def test_crash_between_rows_and_ledger_reads_again_and_counts_once(client: Client, log: Log) -> None:
    """The position moves only when all rows are there."""
    (chunk,) = [chunk for chunk in log.chunks() if ".calls." in chunk.source.topic]

    class Crashing(ClickHouseSink):
        def _insert(self, table: str, rows: Any, token: str) -> None:
            if table == "ingest_ledger":
                raise KeyboardInterrupt
            super()._insert(table, rows, token)

    with pytest.raises(KeyboardInterrupt):
        Crashing(client).write([chunk])
    before = ClickHouseSink(client).positions()
    half = replace(chunk, last=chunk.records[9].offset, records=chunk.records[:10])
    rest = replace(chunk, first=chunk.records[10].offset, records=chunk.records[10:])
    sink = ClickHouseSink(client)
    sink.write([half])
    sink.write([rest])

    assert {} == before
    assert {chunk.source: chunk.last + 1} == sink.positions()
    calls = client.query("SELECT count(), uniqExact(call_id) FROM model_calls FINAL").result_rows
    assert calls[0][0] == calls[0][1]


def test_positions_belong_to_one_incarnation_of_a_topic(client: Client, log: Log) -> None:
    """A topic that was deleted and made anew is read from its beginning."""
    chunk = log.chunks()[0]
    sink = ClickHouseSink(client)

    sink.write([chunk])

    assert {chunk.source: chunk.last + 1} == sink.positions()
    assert chunk.source._replace(topic_id="another") not in sink.positions()


def test_unreadable_record_is_kept_with_its_bytes(client: Client, log: Log) -> None:
    """Nothing is lost: the bytes stand in dead_letters, and the records around them in their tables."""
    (good,) = [chunk for chunk in log.chunks() if ".terminals." in chunk.source.topic]
    bad = LogRecord(len(good.records), b"\xff\x00nonsense", b"k", 5)
    chunk = replace(good, last=bad.offset, records=(*good.records, bad))

    ClickHouseSink(client).write([chunk])

    rows = client.query("SELECT boundary, reason, topic, offset, hex(value), at_ms FROM dead_letters").result_rows
    assert [("sink", "unknown_framing", chunk.source.topic, bad.offset, bad.value.hex().upper(), 5)] == [
        tuple(r) for r in rows
    ]
    assert len(good.records) == client.query("SELECT count() FROM terminals").result_rows[0][0]


def test_record_with_a_broken_array_is_kept_with_its_bytes(client: Client, log: Log) -> None:
    """Bytes that are no whole ids never reach a column."""
    from rollstream.schemas.records import Sample
    from rollstream.schemas.types import PackedIds

    sample = next(record for record in log.records["samples"] if isinstance(record, Sample))
    value = CODEC.encode(replace(sample, ids=PackedIds(sample.ids[:-1])))
    chunk = Chunk(Source("rollstream.samples.v1", 0), 0, 0, (LogRecord(0, value),))

    ClickHouseSink(client).write([chunk])

    assert [("bad_packed_array",)] == [tuple(r) for r in client.query("SELECT reason FROM dead_letters").result_rows]
    assert client.query("SELECT count() FROM samples").result_rows == [(0,)]


def test_token_binds_range_and_content() -> None:
    """An equal token with other rows would drop them silently."""
    one = Chunk(Source("t", 0), 0, 1, (LogRecord(0, b"a"), LogRecord(1, b"b")))

    tokens = {
        chunks_token([one], ["aa"]),
        chunks_token([one], ["ab"]),
        chunks_token([replace(one, last=2)], ["aa"]),
        chunks_token([replace(one, source=Source("t", 1))], ["aa"]),
        chunks_token([one, replace(one, source=Source("t", 1))], ["aa", "aa"]),
        chunks_token([one, replace(one, source=Source("t", 1))], ["aa", "ab"]),
    }

    assert len(tokens) == 6


def test_order_of_chunks_in_a_batch_does_not_change_the_token() -> None:
    """A batch that is written again may come in another order."""
    a, b = Chunk(Source("t", 0), 0, 0, ()), Chunk(Source("t", 1), 0, 0, ())

    assert chunks_token([a, b], ["1", "2"]) == chunks_token([b, a], ["2", "1"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DatabaseError("too many parts", code=252), SinkBusy),
        (OperationalError("connection reset"), SinkBusy),
        (ConnectionResetError("gone"), SinkBusy),
        (DatabaseError("HTTP driver received HTTP status 500, server response: bad gateway"), SinkBusy),
        (DatabaseError("HTTP driver received HTTP status 429"), SinkBusy),
        (DatabaseError("HTTP driver received HTTP status 401, server response: who are you"), SinkError),
        (DatabaseError("no such table", code=60), SinkError),
    ],
)
def test_failure_is_busy_or_final(log: Log, error: Exception, expected: type[Exception]) -> None:
    """A full or absent server is waited for; a wrong table is somebody's work."""

    class Failing:
        def insert_arrow(self, *_: object, **__: object) -> None:
            raise error

    with pytest.raises(SinkError) as caught:
        ClickHouseSink(Failing(), Codec()).write(log.chunks()[:1])  # type: ignore[arg-type]

    assert type(caught.value) is expected
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("url", ["clickhouse://x", "out/clickhouse", "http://"])
def test_address_that_is_none_says_what_is_expected(url: str) -> None:
    """The message shows both forms."""
    with pytest.raises(SettingsError, match="expected chdb://FOLDER or http"):
        connect(url)


def test_late_time_beyond_what_the_store_can_hold_is_clamped(client: Client, log: Log) -> None:
    """A wild clock does not stop the sink, and the field keeps the value."""
    from rollstream.schemas.records import PolicyVersion

    wild = CODEC.encode(PolicyVersion("default", 1, "ref", 1 << 60))
    chunk = Chunk(Source("rollstream.policies.v1", 0), 0, 0, (LogRecord(0, wild),))

    ClickHouseSink(client).write([chunk])

    assert [(1 << 60,)] == [tuple(r) for r in client.query("SELECT published_at_ms FROM policy_versions").result_rows]


def test_step_that_is_recorded_again_counts_once(client: Client) -> None:
    """A trainer that crashed behind its record repeats the step at another time; its samples were trained on once."""
    topic = Source("rollstream.consumptions.v1", 0)
    steps = [Consumption("c-1", "run", 0, "default", 3, 4, ("s-1",), ("g-1",), (), at_ms) for at_ms in (5, 900)]
    logged = tuple(LogRecord(offset, CODEC.encode(step)) for offset, step in enumerate(steps))

    ClickHouseSink(client).write([Chunk(topic, 0, 1, logged)])

    found = client.query("SELECT arrayJoin(sample_ids) FROM consumptions FINAL").result_rows
    assert [("s-1",)] == found
