"""The ClickHouse sink under faults at every step, with the real engine behind an HTTP server that fails when it is told to.

What is checked is the store: its tables hold exactly the log, and its positions are where the log ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from clickhouse_connect.driver.client import Client

from rollstream.errors import SinkError
from rollstream.schemas.records import Consumption
from rollstream.sinks.base import Chunk, SinkBusy
from rollstream.sinks.clickhouse import ClickHouseSink
from rollstream.sinks.connect import connect
from rollstream.sinks.stored import Stored
from rollstream.sinks.tables import TABLES, is_stored, table_of
from tests.services.clickhouse import ClickHouseServer
from tests.unit.sinks.chain import Log, make_log

T = TypeVar("T")
TIMEOUT_S = 1
TRIES = 30
STEPS = (
    "SELECT version()",
    "CREATE DATABASE",
    "CREATE TABLE IF NOT EXISTS schema_migrations",
    "SELECT number FROM schema_migrations",
    "CREATE TABLE IF NOT EXISTS model_calls",
    "CREATE TABLE IF NOT EXISTS ingest_ledger",
    "INSERT INTO schema_migrations",
    "max(last_offset) + 1 FROM ingest_ledger",
    *(f"INSERT INTO {table} (" for table in TABLES),
    "INSERT INTO ingest_ledger",
)
"""What a sink asks of ClickHouse from its start until a chunk is stored."""

FAULTS: dict[str, dict[str, Any]] = {
    "429 of a proxy": {"kind": "status", "status": 429},
    "500 of a proxy": {"kind": "status", "status": 500},
    "503 of a proxy": {"kind": "status", "status": 503},
    "too many parts": {"kind": "status", "status": 500, "exception_code": 252},
    "too many queries": {"kind": "status", "status": 429, "exception_code": 202},
    "reset before": {"kind": "reset_before"},
    "reset after": {"kind": "reset_after"},
    "timeout before": {"kind": "hang"},
    "timeout after": {"kind": "hang_after"},
}
_databases = (f"faults_{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def log() -> Log:
    """A whole run, with a record for every table."""
    log = make_log()
    log.add("consumptions", Consumption("c-1", "run", 0, "default", 3, 4, ("s-1",), ("g-1",), (), 5))
    return log


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    with ClickHouseServer(tmp_path_factory.mktemp("clickhouse")) as server:
        yield server


@pytest.fixture
def server(running: ClickHouseServer) -> Iterator[ClickHouseServer]:
    """The server, with an empty database and no faults."""
    running.database = next(_databases)
    yield running
    running.clear_faults()


def _patiently(do: Callable[[], T], expected: type[SinkError] = SinkBusy) -> T:
    """Try again after each error that may be tried again."""
    for _ in range(TRIES):
        try:
            return do()
        except expected:
            continue
    raise AssertionError(f"still failing after {TRIES} tries")


def _start(server: ClickHouseServer) -> ClickHouseSink:
    """A sink process that cannot open its store ends, and is started again."""
    return _patiently(lambda: ClickHouseSink(connect(server.url, timeout_s=TIMEOUT_S)), SinkError)


def _store(server: ClickHouseServer, chunks: list[Chunk]) -> ClickHouseSink:
    sink = _start(server)
    _patiently(sink.positions)
    for chunk in chunks:
        _patiently(lambda chunk=chunk: sink.write([chunk]))  # type: ignore[misc]
    return sink


def _rows(client: Client, *, final: bool) -> dict[str, int]:
    clause = "FINAL" if final else ""
    return {t: client.query(f"SELECT count() FROM {t} {clause}").result_rows[0][0] for t in TABLES}


def expected_rows(log: Log) -> dict[str, int]:
    """Rows of each table, counted from the records."""
    found = dict.fromkeys(TABLES, 0)
    for noun, records in log.records.items():
        for record in records:
            if is_stored(record, f"rollstream.{noun}.v1"):
                table = table_of(type(record))
                found[table.name] += len(list(table.rows(record)))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_step_leaves_exactly_the_log(server: ClickHouseServer, log: Log, fault: str) -> None:
    """Each step fails once; afterwards each row is there once, without FINAL, and positions are where the log ends."""
    for step in STEPS:
        server.fault(match=step, **FAULTS[fault])

    sink = _store(server, log.chunks())

    client = connect(server.url, migrate=False)
    assert [] == server.faults_waiting()
    assert expected_rows(log) == _rows(client, final=False)
    assert {chunk.source: chunk.last + 1 for chunk in log.chunks()} == sink.positions()
    ledger = client.query("SELECT count(), uniqExact(topic) FROM ingest_ledger").result_rows[0]
    assert (len(log.chunks()), len(log.chunks())) == tuple(ledger)


def test_faults_at_random_leave_exactly_the_log(server: ClickHouseServer, log: Log) -> None:
    """Several faults in a row, at any insert."""
    chunks = log.chunks(9)
    for skip, fault in enumerate([*FAULTS.values()] * 2):
        server.fault(match="INSERT INTO", skip=skip % 5, **fault)

    sink = _store(server, chunks)

    assert [] == server.faults_waiting()
    assert expected_rows(log) == _rows(connect(server.url, migrate=False), final=False)
    assert {chunk.source: chunk.last + 1 for chunk in chunks} == sink.positions()


def test_replay_from_the_beginning_adds_no_row(server: ClickHouseServer, log: Log) -> None:
    """Positions are lost and the log is read again, cut elsewhere, while inserts fail: FINAL shows no second row."""
    sink = _store(server, log.chunks())
    client = connect(server.url, migrate=False)
    client.command("TRUNCATE TABLE ingest_ledger")
    for skip, fault in enumerate(FAULTS.values()):
        server.fault(match="INSERT INTO", skip=skip, **fault)

    assert {} == _patiently(sink.positions)
    _store(server, log.chunks(7))

    assert expected_rows(log) == _rows(client, final=True)
    assert {chunk.source: chunk.last + 1 for chunk in log.chunks()} == sink.positions()


def test_materialized_view_counts_a_repeated_insert_once(server: ClickHouseServer, log: Log) -> None:
    """Somebody's own view sees the rows of an insert once, though its answer was lost, if its table has a window, too."""
    sink = _start(server)
    client = connect(server.url, migrate=False)
    client.command(
        "CREATE TABLE tally (calls UInt64) ENGINE = SummingMergeTree ORDER BY tuple() "
        "SETTINGS non_replicated_deduplication_window = 1000"
    )
    client.command("CREATE MATERIALIZED VIEW tally_view TO tally AS SELECT count() AS calls FROM model_calls")
    server.fault("reset_after", match="INSERT INTO model_calls")
    server.fault("reset_after", match="INSERT INTO ingest_ledger")

    for chunk in log.chunks():
        _patiently(lambda chunk=chunk: sink.write([chunk]))  # type: ignore[misc]

    assert [] == server.faults_waiting()
    assert expected_rows(log)["model_calls"] == client.query("SELECT sum(calls) FROM tally").result_rows[0][0]


def test_rows_and_positions_outlive_a_crash_of_the_server(tmp_path: Path, log: Log) -> None:
    """SIGKILL of ClickHouse between two chunks: the sink waits, and goes on as if nothing had been."""
    with ClickHouseServer(tmp_path) as server:
        first, *rest = log.chunks()
        sink = _store(server, [first])
        server.kill()
        with pytest.raises(SinkBusy):
            sink.write(rest[:1])
        with pytest.raises(SinkBusy):
            sink.positions()
        server.start()

        _store(server, rest)

        assert expected_rows(log) == _rows(connect(server.url, migrate=False), final=False)
        assert {chunk.source: chunk.last + 1 for chunk in log.chunks()} == sink.positions()


def test_server_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, log: Log) -> None:
    """A frozen server answers nothing and closes nothing; the insert ends after its timeout and is sent again."""
    chunk = log.chunks()[0]
    with ClickHouseServer(tmp_path) as server:
        sink = _start(server)
        server.pause()
        with pytest.raises(SinkBusy, match="now: Error HTTPConnectionPool"):
            sink.write([chunk])
        server.resume()

        _patiently(lambda: sink.write([chunk]))

        assert {chunk.source: chunk.last + 1} == sink.positions()


def test_store_is_asked_about_more_groups_than_a_url_can_name(server: ClickHouseServer) -> None:
    """The client sends long parameters as a form; an audit asks about hundreds of groups at once."""
    group_ids = [f"{'g' * 90}-{number:04}" for number in range(700)]

    stored = Stored(connect(server.url))

    assert group_ids == [one.group_id for one in stored.load(group_ids)]
