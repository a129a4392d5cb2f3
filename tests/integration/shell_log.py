"""Topics, input and output of the shell's integration tests, through confluent-kafka."""

from __future__ import annotations

import time
from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from rollstream.kafka import client_properties, producer_properties
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import Record
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.unit.processors.shell.stages import ended, observed, opened

NOUNS = ("calls", "environment", "terminals", "rollouts", "groups", "scores", "rewards", "credits", "samples")

# One start for all runs that are compared. Not in the past: message times are event times, and retention goes by them.
_START_MS = int(time.time() * 1000)


def kafka_settings(bootstrap: str, prefix: str) -> KafkaSettings:
    """Settings of a test's own topics."""
    return KafkaSettings(bootstrap=bootstrap, prefix=prefix, partitions=3)


def make_topics(kafka: KafkaSettings) -> None:
    """All topics."""
    apply_topics(kafka)


def rollouts(first: int, last: int, *, events: int = 4, open_for: int = 40) -> Iterator[tuple[str, Record]]:
    """Records of rollouts `first` to `last`, two a group, many open at a time, as (topic noun, record)."""
    waiting: list[tuple[str, str, int]] = []
    for number in range(first, last):
        name, group, at_ms = f"r{number:06d}", f"g{number // 2:06d}", _START_MS + number
        yield "calls", opened(name, group=group, at_ms=at_ms)
        for event in range(events):
            yield "environment", observed(name, f"{event}" * 50, group=group, at_ms=at_ms)
        # Every seventh stays open far longer than the others, and pins the watermarks.
        waiting.append((name, group, at_ms + 10))
        if len(waiting) > open_for:
            yield from _end(*waiting.pop(0 if number % 7 else open_for // 2))
    for rest in waiting:
        yield from _end(*rest)


def _end(name: str, group: str, at_ms: int) -> Iterator[tuple[str, Record]]:
    for noun in ("calls", "environment", "terminals"):
        yield noun, ended(name, group=group, at_ms=at_ms)


class Writer:
    """Writes records as the gateway does."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._producer, self._codec, self._prefix = Producer(producer_properties(kafka)), Codec(), kafka.prefix

    def write(self, noun: str, record: Record) -> None:
        """Queue a record."""
        m = to_message(record, self._codec, prefix=self._prefix, source="/test", noun=noun)
        self._producer.produce(m.topic, m.value, m.key, timestamp=m.timestamp_ms, headers=list(m.headers))
        self._producer.poll(0)

    def write_bytes(self, noun: str, value: bytes, partition: int) -> None:
        """Queue anything."""
        self._producer.produce(topics()[noun].name(self._prefix), value, b"k", partition=partition)

    def flush(self) -> None:
        """Wait for all acknowledgements."""
        assert self._producer.flush(30) == 0


def ends(kafka: KafkaSettings, nouns: tuple[str, ...] = NOUNS) -> dict[tuple[str, int], int]:
    """(noun, partition) → end of the log, of partitions that hold anything."""
    reader = _reader(kafka)
    found = {}
    for noun in nouns:
        for number in range(kafka.partitions):
            try:
                _, high = reader.get_watermark_offsets(TopicPartition(topics()[noun].name(kafka.prefix), number), 10)
            except KafkaException:  # made a moment ago, without a leader yet
                continue
            if high:
                found[noun, number] = high
    reader.close()
    return found


def committed(kafka: KafkaSettings, group: str) -> dict[tuple[str, int], int]:
    """(noun, partition) → committed offset, where there is any other than 0."""
    reader = _reader(kafka, group)
    asked = [TopicPartition(topics()[n].name(kafka.prefix), p) for n in NOUNS for p in range(kafka.partitions)]
    by_name = {topics()[noun].name(kafka.prefix): noun for noun in NOUNS}
    try:
        found = reader.committed(asked, 10)
    except KafkaException:  # a broker that has just started loads its groups first
        found = []
    reader.close()
    return {(by_name[tp.topic], tp.partition): tp.offset for tp in found if tp.offset > 0}


def read(kafka: KafkaSettings, noun: str) -> list[tuple[int, bytes, bytes, dict[str, bytes]]]:
    """All messages of a topic: (partition, key, value, headers), by partition in log order."""
    reader = _reader(kafka)
    found = []
    name = topics()[noun].name(kafka.prefix)
    for number in range(len(reader.list_topics(name, 10).topics[name].partitions)):
        low, high = reader.get_watermark_offsets(TopicPartition(name, number), 10)
        reader.assign([TopicPartition(name, number, low)])
        at = low
        while at < high:
            for message in reader.consume(high - at, 5):
                assert message.error() is None
                at = message.offset() + 1
                found.append((number, message.key(), message.value(), dict(message.headers() or [])))
    reader.close()
    return found


def _reader(kafka: KafkaSettings, group: str = "reader") -> Consumer:
    return Consumer({**client_properties(kafka), "group.id": group, "enable.auto.commit": False})
