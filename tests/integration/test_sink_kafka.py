"""Sinks on Apache Kafka: processes that are killed at any moment, and stores that hold the whole log once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rollstream.object_store import open_store
from rollstream.process import ServiceProcess
from rollstream.schemas.records import RECORDS
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings, Settings, SinkSettings
from rollstream.sinks.memory import MemorySink
from rollstream.sinks.metrics import SinkMetrics
from rollstream.sinks.objects import list_manifests, read_records
from rollstream.sinks.run import consume
from tests.integration.sink_input import WAIT_S, produce, wait
from tests.unit.sinks.chain import ROOT, Log, make_log

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def log() -> Log:
    return make_log()


@pytest.fixture
def start_sink(kafka_settings: KafkaSettings, tmp_path: Path) -> Iterator[Callable[[str, str], ServiceProcess]]:
    """Starts a sink process; ends it after the test."""
    made: list[ServiceProcess] = []

    def start(kind: str, url: str) -> ServiceProcess:
        env = {
            "ROLLSTREAM_KAFKA__BOOTSTRAP": kafka_settings.bootstrap,
            "ROLLSTREAM_KAFKA__PREFIX": kafka_settings.prefix,
            "ROLLSTREAM_KAFKA__SESSION_TIMEOUT_MS": "6000",
            "ROLLSTREAM_SINK__CLICKHOUSE": url,
            "ROLLSTREAM_SINK__OBJECTS": url,
            "ROLLSTREAM_SINK__CHUNK_RECORDS": "5",
            "ROLLSTREAM_SINK__MAX_AGE_S": "0.3",
            "ROLLSTREAM_SINK__OBJECTS_MAX_AGE_S": "0.3",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "rollstream", "sink", kind]
        made.append(ServiceProcess("sink", command, log_file=tmp_path / "sink.log", env=env, stop_timeout_s=30))
        made[0].start()
        return made[0]

    yield start
    for process in made:
        process.kill()


@pytest.fixture
def memory(kafka_settings: KafkaSettings) -> Iterator[tuple[MemorySink, SinkMetrics]]:
    """A memory sink that reads in a thread."""
    sink, stop, metrics = MemorySink(), threading.Event(), SinkMetrics(CollectorRegistry())
    settings = Settings(kafka=kafka_settings, sink=SinkSettings(chunk_records=5, max_age_s=0.3))
    thread = threading.Thread(target=consume, args=(settings, "memory", sink, stop, metrics))
    thread.start()
    yield sink, metrics
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_loop_reads_every_topic_whole(
    kafka_settings: KafkaSettings, memory: tuple[MemorySink, SinkMetrics], log: Log
) -> None:
    """All records of all topics and partitions, with no committed offset to start from."""
    sink, metrics = memory
    expected = sum(map(len, log.records.values()))

    produce(kafka_settings, log)
    wait(lambda: sum(map(len, sink.records.values())) == expected, "all records are read")

    by_topic = {source.topic: 0 for source in sink.records}
    for source, records in sink.records.items():
        by_topic[source.topic] += len(records)
    assert {topics()[n].name(kafka_settings.prefix): len(r) for n, r in log.records.items() if r} == by_topic
    assert metrics.records._value.get() == expected
    assert all(source.topic_id for source in sink.records)


def test_clickhouse_sink_killed_at_any_moment_holds_everything_once(
    kafka_settings: KafkaSettings, tmp_path: Path, log: Log, start_sink: Callable[[str, str], ServiceProcess]
) -> None:
    """SIGKILL twice while it reads, then SIGTERM: the audit passes and every row is there once."""
    url = f"chdb://{tmp_path}/clickhouse"
    expected = {r.call_id for r in log.records["calls"] if type(r).__name__ == "CallStarted"}  # type: ignore[union-attr]

    sink = start_sink("clickhouse", url)
    produce(kafka_settings, log)
    total = sum(map(len, log.records.values()))
    for part in (0.9, 0.5):  # killed while it writes
        wait(lambda part=part: _lag(kafka_settings, "clickhouse") < part * total, "the sink has written a part")  # type: ignore[misc]
        sink.kill()
        sink.start()
    wait(lambda: _lag(kafka_settings, "clickhouse") == 0, "the sink has read everything")
    sink.stop()

    done = _rollstream(kafka_settings, "audit", "--json", "--store", url)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr + sink.log_text()
    assert report["counts"]["calls started"] == len(expected)
    assert report["counts"]["samples"] == len(
        {r.sample_id for r in log.records["samples"] if hasattr(r, "sample_id")}
    )


def test_objects_sink_killed_at_any_moment_holds_everything_once(
    kafka_settings: KafkaSettings, tmp_path: Path, log: Log, start_sink: Callable[[str, str], ServiceProcess]
) -> None:
    """Manifests name each offset exactly once, without any query that removes doubles."""
    sink = start_sink("objects", str(tmp_path / "objects"))
    produce(kafka_settings, log)
    total = sum(map(len, log.records.values()))
    for part in (0.9, 0.5):  # killed while it writes
        wait(lambda part=part: _lag(kafka_settings, "objects") < part * total, "the sink has written a part")  # type: ignore[misc]
        sink.kill()
        sink.start()
    wait(lambda: _lag(kafka_settings, "objects") == 0, "the sink has read everything")
    sink.stop()

    store = open_store(str(tmp_path / "objects"))
    for record in RECORDS.values():
        expected = [repr(r) for records in log.records.values() for r in records if type(r) is record]
        assert sorted(expected) == sorted(map(repr, read_records(store, record)))
    assert list_manifests(store)


def test_folder_in_use_says_so(
    kafka_settings: KafkaSettings, tmp_path: Path, start_sink: Callable[[str, str], ServiceProcess]
) -> None:
    """The embedded engine belongs to one process; the second one is told."""
    url = f"chdb://{tmp_path}/clickhouse"
    sink = start_sink("clickhouse", url)
    wait((tmp_path / "clickhouse" / "status").exists, "the sink has opened the folder")

    done = _rollstream(kafka_settings, "audit", "--store", url)
    sink.stop()

    assert done.returncode == 2
    assert "belongs to one process at a time" in done.stderr


def _rollstream(kafka: KafkaSettings, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ROLLSTREAM_KAFKA__BOOTSTRAP": kafka.bootstrap, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rollstream", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=WAIT_S)


def _lag(kafka: KafkaSettings, kind: str) -> int:
    """Records behind the offsets that the sink committed; commits only follow writes."""
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": f"{kafka.prefix}.sink.{kind}"})
    names = {topic.name(kafka.prefix): topic.partitions(kafka.partitions) for topic in topics().values()}
    partitions = [TopicPartition(name, p) for name, count in names.items() for p in range(count)]
    lag = 0
    try:
        offsets = consumer.committed(partitions, timeout=WAIT_S)
    except KafkaException:  # the group's coordinator is not there yet
        offsets = partitions
    for committed in offsets:
        _, high = consumer.get_watermark_offsets(TopicPartition(committed.topic, committed.partition), timeout=WAIT_S)
        lag += high - max(committed.offset, 0)
    consumer.close()
    return lag
