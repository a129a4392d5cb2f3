"""Reads whole topics, for comparing what was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

from confluent_kafka import Consumer, KafkaException, TopicPartition

from rollstream.kafka import client_properties
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings


def read_topic(
    kafka: KafkaSettings, noun: str, at: MutableMapping[int, int] | None = None
) -> Iterator[tuple[int, bytes]]:
    """(partition, value) of every record that the topic holds now, in log order within a partition.

    Args: at: partition → offset to begin with, 0 where there is none; moved on by what was read, so that a second call with it
        reads what came meanwhile.
    """
    at = {} if at is None else at
    consumer = Consumer(
        {**client_properties(kafka), "group.id": "reader", "enable.partition.eof": False, "enable.auto.commit": False}
    )
    name = topics()[noun].name(kafka.prefix)
    try:
        ends = {}
        for partition in consumer.list_topics(name, timeout=10).topics[name].partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(name, partition), timeout=10)
            at[partition] = max(at.get(partition, 0), low)
            if high > at[partition]:
                ends[partition] = high
        consumer.assign([TopicPartition(name, partition, at[partition]) for partition in ends])
        while ends:
            # Not more than are there: it would wait for them until the time is up.
            missing = sum(end - at[partition] for partition, end in ends.items())
            for message in consumer.consume(min(missing, 1_000), timeout=1):
                assert message.error() is None, message.error()
                yield message.partition(), message.value()
                at[message.partition()] = message.offset() + 1
                if at[message.partition()] >= ends.get(message.partition(), 1 << 62):
                    del ends[message.partition()]
    finally:
        consumer.close()


def is_readable(kafka: KafkaSettings, noun: str) -> bool:
    """Whether every partition has a leader that answers; not so for a moment after a topic was made or a broker froze."""
    try:
        list(read_topic(kafka, noun))
    except KafkaException:
        return False
    return True


def uncommitted(kafka: KafkaSettings, group: str, nouns: Iterable[str]) -> int:
    """Records of these topics behind which a consumer group has not committed."""
    consumer = Consumer({**client_properties(kafka), "group.id": group})
    try:
        wanted = [
            TopicPartition(topics()[noun].name(kafka.prefix), partition)
            for noun in nouns
            for partition in range(topics()[noun].partitions(kafka.partitions))
        ]
        committed = consumer.committed(wanted, timeout=10)
        return sum(consumer.get_watermark_offsets(p, timeout=10)[1] - max(p.offset, 0) for p in committed)
    finally:
        consumer.close()
