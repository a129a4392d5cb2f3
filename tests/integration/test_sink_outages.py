"""Sinks on Apache Kafka while their store fails: killed between two steps, cut off for longer than a session, overtaken.

The store is ClickHouse's engine behind an HTTP server that fails when it is told to; what the sink holds is seen in its counters.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client import CollectorRegistry

from rollstream.process import ServiceProcess
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings, Settings, SinkSettings
from rollstream.sinks.clickhouse import ClickHouseSink
from rollstream.sinks.connect import connect
from rollstream.sinks.metrics import SinkMetrics
from rollstream.sinks.run import consume
from rollstream.sinks.tables import TABLES
from tests.integration.sink_input import WAIT_S, produce, wait
from tests.integration.test_sink_faults import expected_rows
from tests.services.clickhouse import ClickHouseServer, FaultKind
from tests.unit.sinks.chain import CODEC, ROOT, Log, make_log

pytestmark = pytest.mark.kafka

CHUNK_RECORDS = 5


@pytest.fixture(scope="module")
def log() -> Log:
    return make_log()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ClickHouseServer]:
    with ClickHouseServer(tmp_path / "clickhouse") as server:
        yield server
        server.clear_faults()


@dataclass
class Running:
    """A sink that reads in a thread, and its counters."""

    metrics: SinkMetrics
    stop: threading.Event
    thread: threading.Thread

    def busy(self) -> float:
        """How often its store could not take a write."""
        return float(self.metrics.busy._value.get())

    def held_bytes(self) -> float:
        """What it has read and not stored."""
        return float(self.metrics.held._value.get())


@pytest.fixture
def start_thread(kafka_settings: KafkaSettings, server: ClickHouseServer) -> Iterator[Callable[[], Running]]:
    """Starts a sink in this process; ends it after the test."""
    made: list[Running] = []

    def start() -> Running:
        settings = Settings(
            kafka=kafka_settings, sink=SinkSettings(chunk_records=CHUNK_RECORDS, max_age_s=0.3, clickhouse=server.url)
        )
        sink = ClickHouseSink(connect(server.url, timeout_s=2), CODEC)
        stop, metrics = threading.Event(), SinkMetrics(CollectorRegistry())
        thread = threading.Thread(target=consume, args=(settings, "clickhouse", sink, stop, metrics))
        thread.start()
        made.append(Running(metrics, stop, thread))
        return made[-1]

    yield start
    for running in made:
        running.stop.set()
        running.thread.join(WAIT_S)
        assert not running.thread.is_alive()


@pytest.fixture
def sink_process(kafka_settings: KafkaSettings, server: ClickHouseServer, tmp_path: Path) -> Iterator[ServiceProcess]:
    """A sink process that is not started yet."""
    env = {
        "ROLLSTREAM_KAFKA__BOOTSTRAP": kafka_settings.bootstrap,
        "ROLLSTREAM_KAFKA__PREFIX": kafka_settings.prefix,
        "ROLLSTREAM_KAFKA__SESSION_TIMEOUT_MS": str(kafka_settings.session_timeout_ms),
        "ROLLSTREAM_SINK__CLICKHOUSE": server.url,
        "ROLLSTREAM_SINK__CHUNK_RECORDS": str(CHUNK_RECORDS),
        "ROLLSTREAM_SINK__MAX_AGE_S": "0.3",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "rollstream", "sink", "clickhouse"]
    process = ServiceProcess(
        "sink", command, log_file=tmp_path / "sink.log", env=env, cwd=tmp_path, stop_timeout_s=30
    )
    yield process
    process.stop()


@pytest.mark.parametrize("kind", ["hang", "hang_after"])
def test_sink_killed_around_its_ledger_row_stores_every_row_once(
    kafka_settings: KafkaSettings, server: ClickHouseServer, sink_process: ServiceProcess, log: Log, kind: FaultKind
) -> None:
    """SIGKILL between rows and ledger, and between ledger and commit: the next one goes on where the store says."""
    server.fault(kind, match="INSERT INTO ingest_ledger", skip=2)
    sink_process.start()
    produce(kafka_settings, log)
    wait(lambda: not server.faults_waiting(), "the sink hangs at its ledger row", sink_process)

    sink_process.kill()
    server.clear_faults()
    sink_process.start()
    wait(lambda: _is_stored(kafka_settings, server), "everything is stored", sink_process)

    assert expected_rows(log) == _rows(server)


def test_fresh_group_and_lost_positions_read_everything_again_into_the_same_rows(
    kafka_settings: KafkaSettings, server: ClickHouseServer, start_thread: Callable[[], Running], log: Log
) -> None:
    """The whole log twice into the same tables, and FINAL shows it once."""
    produce(kafka_settings, log)
    first = start_thread()
    wait(lambda: _is_stored(kafka_settings, server), "everything is stored")
    first.stop.set()
    first.thread.join(WAIT_S)
    connect(server.url, migrate=False).command("TRUNCATE TABLE ingest_ledger")

    start_thread()
    wait(lambda: _is_stored(kafka_settings, server), "everything is stored again")

    assert expected_rows(log) == _rows(server)


def test_store_that_is_away_for_longer_than_a_session_costs_nothing(
    kafka_settings: KafkaSettings, server: ClickHouseServer, start_thread: Callable[[], Running], log: Log
) -> None:
    """The sink stays in its group, holds no more than when it stopped reading, commits nothing; then everything is stored."""
    produce(kafka_settings, log)
    sink = start_thread()
    wait(lambda: _is_stored(kafka_settings, server), "everything is stored")
    members, committed = _members(kafka_settings), _committed(kafka_settings)
    server.kill()

    produce(kafka_settings, log)
    wait(lambda: sink.busy() > 0, "the store is found to be away")
    away_since_s, held_bytes = time.monotonic(), sink.held_bytes()
    for _ in range(5):
        produce(kafka_settings, log)
    session_s = kafka_settings.session_timeout_ms / 1000
    wait(lambda: time.monotonic() > away_since_s + 1.5 * session_s, "a session has passed")

    assert members == _members(kafka_settings)
    assert committed == _committed(kafka_settings)
    assert sink.busy() >= 3
    assert 0 < sink.held_bytes() <= held_bytes + _largest_chunks(log)
    server.start()
    wait(lambda: _is_stored(kafka_settings, server), "everything is stored")
    assert expected_rows(log) == _rows(server)


def test_group_that_changes_during_an_outage_waits_for_the_store(
    kafka_settings: KafkaSettings, server: ClickHouseServer, start_thread: Callable[[], Running], log: Log
) -> None:
    """A second sink comes while ClickHouse cannot tell positions: both stay, and share the work afterwards."""
    first = start_thread()
    wait(lambda: len(_members(kafka_settings)) == 1, "the first one is in the group")
    second = start_thread()
    server.fault("status", match="FROM ingest_ledger", status=503, count=1_000)
    produce(kafka_settings, log)
    wait(lambda: first.busy() > 0 or second.busy() > 0, "positions are asked for in vain")
    server.clear_faults()

    wait(lambda: _is_stored(kafka_settings, server), "everything is stored")

    assert len(_members(kafka_settings)) == 2
    assert expected_rows(log) == _rows(server)


def test_retention_that_overtakes_a_running_sink_is_counted(
    kafka_settings: KafkaSettings,
    server: ClickHouseServer,
    start_thread: Callable[[], Running],
    log: Log,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Records that are gone before they are stored are told by partition, and what follows them is stored."""
    sink = start_thread()
    server.fault("status", match="INSERT INTO", status=503, count=1_000)
    topic = topics()["calls"].name(kafka_settings.prefix)
    produce(kafka_settings, log)
    wait(lambda: sink.busy() > 0, "the store is found to be away")
    for _ in range(3):
        produce(kafka_settings, log)
    ends = {p: _ends(kafka_settings)[topic, p] for p in range(kafka_settings.partitions)}
    cut = [TopicPartition(topic, p, end - 1) for p, end in ends.items() if end > 0]
    admin = AdminClient({"bootstrap.servers": kafka_settings.bootstrap})
    for future in admin.delete_records(cut).values():
        future.result(WAIT_S)

    server.clear_faults()
    wait(lambda: _is_stored(kafka_settings, server), "what is left is stored")

    skipped = sink.metrics.skipped._value.get()
    stored = connect(server.url, migrate=False).query(
        "SELECT sum(last_offset + 1 - first_offset) FROM ingest_ledger FINAL WHERE topic = {topic:String}",
        parameters={"topic": topic},
    )
    assert skipped > 0
    assert sum(ends.values()) == skipped + stored.result_rows[0][0]
    assert "retention was faster" in caplog.text


def _largest_chunks(log: Log) -> int:
    """Bytes that one more read may bring to a chunk of each topic."""
    return sum(max((chunk.size_bytes for chunk in log.chunks(CHUNK_RECORDS)), default=0) for _ in topics())


def _partitions(kafka: KafkaSettings) -> list[TopicPartition]:
    names = {topic.name(kafka.prefix): topic.partitions(kafka.partitions) for topic in topics().values()}
    return [TopicPartition(name, p) for name, count in names.items() for p in range(count)]


def _ends(kafka: KafkaSettings) -> dict[tuple[str, int], int]:
    """The end of each partition's log."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "nobody"})
    try:
        return {
            (p.topic, p.partition): consumer.get_watermark_offsets(p, timeout=WAIT_S)[1] for p in _partitions(kafka)
        }
    finally:
        consumer.close()


def _is_stored(kafka: KafkaSettings, server: ClickHouseServer) -> bool:
    """Whether the store's positions are where the logs end."""
    positions = ClickHouseSink(connect(server.url, migrate=False)).positions()
    found = {(source.topic, source.partition): offset for source, offset in positions.items()}
    return all(found.get(key, 0) == end for key, end in _ends(kafka).items())


def _rows(server: ClickHouseServer) -> dict[str, int]:
    client = connect(server.url, migrate=False)
    return {t: client.query(f"SELECT count() FROM {t} FINAL").result_rows[0][0] for t in TABLES}


def _members(kafka: KafkaSettings) -> set[str]:
    group = f"{kafka.prefix}.sink.clickhouse"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    return {member.member_id for member in admin.describe_consumer_groups([group])[group].result(WAIT_S).members}


def _committed(kafka: KafkaSettings) -> list[tuple[str, int, int]]:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": f"{kafka.prefix}.sink.clickhouse"})
    try:
        found = consumer.committed(_partitions(kafka), timeout=WAIT_S)
        return sorted((p.topic, p.partition, p.offset) for p in found)
    finally:
        consumer.close()
