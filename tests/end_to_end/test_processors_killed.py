"""Processors killed in the middle leave no trace in the samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from rollstream.kafka import client_properties, producer_properties
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import GroupBuilt, Record, Sample
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.end_to_end.processes import our_process
from tests.end_to_end.topic_reader import is_readable, read_topic, uncommitted
from tests.source_log import Entry, source_log

GROUPS = 300
DERIVED = ("rollouts", "groups", "scores", "rewards", "credits", "samples", "dead-letters")


@pytest.mark.timeout(300)
def test_samples_are_the_same_bytes_when_processors_are_killed(kafka_settings: KafkaSettings, tmp_path: Path) -> None:
    """Two SIGKILLs in the middle of a source log give, record for record, the samples of an undisturbed run over it."""
    log = source_log(GROUPS, 4, seed=7, start_ms=time.time_ns() // 1_000_000)
    _write(kafka_settings, log[: len(log) // 2])

    with our_process("processor", ["processor"], tmp_path, kafka_settings) as processor:
        _wait(lambda: _built(kafka_settings) > GROUPS // 10)
        processor.kill()
        processor.start()
        _write(kafka_settings, log[len(log) // 2 :])
        built_before = _built(kafka_settings)
        _wait(lambda: _built(kafka_settings) > built_before + GROUPS // 10)
        processor.kill()
        processor.start()
        _wait(lambda: _built(kafka_settings) == GROUPS)
        _wait(lambda: uncommitted(kafka_settings, _group(kafka_settings), ("calls", "environment", "terminals")) == 0)
    disturbed = _samples(kafka_settings)
    _forget_derived(kafka_settings)
    with our_process("undisturbed", ["processor"], tmp_path, kafka_settings):
        _wait(lambda: _built(kafka_settings) == GROUPS)
    undisturbed = _samples(kafka_settings)

    assert disturbed == undisturbed
    assert len(undisturbed) > GROUPS
    assert list(read_topic(kafka_settings, "dead-letters")) == []


def _write(kafka: KafkaSettings, log: list[Entry]) -> None:
    producer = Producer(producer_properties(kafka))
    codec = Codec()
    for noun, record in log:
        message = to_message(record, codec, prefix=kafka.prefix, source="/test", noun=noun)
        producer.produce(
            message.topic,
            message.value,
            message.key,
            timestamp=message.timestamp_ms,
            headers=list(message.headers),
            on_delivery=_acked,
        )
        producer.poll(0)
    assert producer.flush(60) == 0


def _acked(error: object, message: object) -> None:
    assert error is None, error


def _samples(kafka: KafkaSettings) -> dict[tuple[int, str], bytes]:
    """Encoded samples and group markers by partition and identity; a doubled one must be a twin."""
    codec = Codec()
    found: dict[tuple[int, str], bytes] = {}
    for partition, value in read_topic(kafka, "samples"):
        record: Record = codec.decode(value)
        assert isinstance(record, Sample | GroupBuilt)
        identity = record.sample_id if isinstance(record, Sample) else record.group_id
        assert found.setdefault((partition, identity), value) == value
    return found


def _built(kafka: KafkaSettings) -> int:
    codec = Codec()
    records = (codec.decode(value) for _, value in read_topic(kafka, "samples"))
    return len({record.group_id for record in records if isinstance(record, GroupBuilt)})


def _group(kafka: KafkaSettings) -> str:
    return f"{kafka.prefix}.processor.join-group-score-reward-credit-build"


def _forget_derived(kafka: KafkaSettings) -> None:
    """Delete everything the processors wrote, their positions too; the source topics stay."""
    admin = AdminClient(client_properties(kafka))
    names = [topics()[noun].name(kafka.prefix) for noun in DERIVED]
    for future in admin.delete_topics(names).values():
        future.result()
    _wait(lambda: _group_is_deleted(admin, _group(kafka)))
    _wait(lambda: not set(names) & set(admin.list_topics(timeout=10).topics))
    apply_topics(kafka)
    _wait(lambda: all(is_readable(kafka, noun) for noun in DERIVED))


def _group_is_deleted(admin: AdminClient, group: str) -> bool:
    """Try to delete the group; a static member stays in it until its session ends."""
    try:
        admin.delete_consumer_groups([group])[group].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.NON_EMPTY_GROUP:
            return False
        raise
    return True


def _wait(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s:g} s"
        time.sleep(0.05)
