"""Producers of different versions and framings in one run, through the real processors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from confluent_kafka import Producer

from rollstream.kafka import producer_properties
from rollstream.schemas.codec import Codec, schema_files
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import EnvironmentEvent, GroupBuilt, Record, Sample
from rollstream.schemas.registry import ConfluentRegistry, open_codec
from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.end_to_end.processes import our_process
from tests.end_to_end.topic_reader import read_topic
from tests.services.registry import SchemaRegistry
from tests.source_log import Entry, source_log
from tests.unit.schemas.next_versions import adds_a_field_in_front, body_of, next_schema

GROUPS = 30
WAIT_S = 120.0


@pytest.mark.timeout(900)
def test_producers_of_all_versions_and_framings_build_the_groups_of_one(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    """Single-object encoding, a registry's ids, and events of a version that only the registry knows, interleaved within every
    rollout: what is built is, byte for byte, what one producer gives.
    """
    log = source_log(GROUPS, 3, seed=11, start_ms=time.time_ns() // 1_000_000)
    alone = kafka_settings.model_copy(update={"prefix": f"{kafka_settings.prefix}-one"})
    apply_topics(alone)
    with SchemaRegistry(tmp_path / "registry") as registry:
        client = ConfluentRegistry(registry.url)
        for schema in schema_files().values():
            client.register(schema)
        newer = next_schema("environment_event", adds_a_field_in_front)
        newer_id = registry.register("rollstream.EnvironmentEvent", newer.text)
        codecs = [Codec(), open_codec(registry.url, None)]

        def mixed(index: int, record: Record) -> bytes:
            if isinstance(record, EnvironmentEvent) and index % 3 == 0:
                return b"\x00" + newer_id.to_bytes(4, "big") + body_of(record, newer)
            return codecs[index % 2].encode(record)

        _write(kafka_settings, log, mixed)
        _write(alone, log, lambda _, record: codecs[1].encode(record))

        found = [_built(kafka, tmp_path / kafka.prefix, registry, codecs[1]) for kafka in (kafka_settings, alone)]

    assert found[0] == found[1]
    assert GROUPS < len(found[0])


def _write(kafka: KafkaSettings, log: list[Entry], encode) -> None:  # type: ignore[no-untyped-def]
    producer = Producer(producer_properties(kafka))
    for index, (noun, record) in enumerate(log):
        message = to_message(record, Codec(), prefix=kafka.prefix, source="/test", noun=noun)
        producer.produce(
            message.topic,
            encode(index, record),
            message.key,
            timestamp=message.timestamp_ms,
            headers=list(message.headers),
            on_delivery=_acked,
        )
        producer.poll(0)
    assert producer.flush(60) == 0


def _acked(error: object, message: object) -> None:
    assert error is None, error


def _built(
    kafka: KafkaSettings, folder: Path, registry: SchemaRegistry, codec: Codec
) -> dict[tuple[int, str], bytes]:
    """Run the processors until all groups are built. Returns: values of the samples topic by partition and identity."""
    folder.mkdir()
    with our_process("processor", ["processor"], folder, kafka, KAFKA__REGISTRY_URL=registry.url) as processor:
        processor.wait_until(lambda: _count(kafka, codec) == GROUPS, WAIT_S, "all groups are built")
    assert [] == list(read_topic(kafka, "dead-letters"))
    found: dict[tuple[int, str], bytes] = {}
    for partition, value in read_topic(kafka, "samples"):
        record = codec.decode(value)
        assert isinstance(record, Sample | GroupBuilt)
        found[partition, record.sample_id if isinstance(record, Sample) else record.group_id] = value
    return found


def _count(kafka: KafkaSettings, codec: Codec) -> int:
    records = (codec.decode(value) for _, value in read_topic(kafka, "samples"))
    return len({record.group_id for record in records if isinstance(record, GroupBuilt)})
