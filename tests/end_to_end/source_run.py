"""A source log, what processors make of it, and how far they are: for tests that disturb processors and compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from confluent_kafka import Producer

from rollstream.kafka import producer_properties
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import GroupBuilt, Record, Sample
from rollstream.settings import KafkaSettings
from tests.end_to_end.topic_reader import is_readable, read_topic, uncommitted
from tests.source_log import Entry

SOURCES = ("calls", "environment", "terminals")
Samples = dict[tuple[int, str], bytes]
"""(partition, identity) → encoded sample or group marker."""


class SourceRun:
    """One topic prefix with a source log in it. Args: codec: reads what the processors write."""

    def __init__(self, kafka: KafkaSettings, codec: Codec | None = None) -> None:
        self.kafka = kafka
        self._codec = codec or Codec()
        self._built: set[str] = set()
        self._counted_to: dict[int, int] = {}
        self.group = f"{kafka.prefix}.processor.join-group-score-reward-credit-build"
        """The processors' consumer group."""

    def write(self, log: Sequence[Entry], encode: Callable[[int, Record], bytes] | None = None) -> None:
        """Write entries; returns when all are acknowledged. Args: encode: from an entry's number and record to its bytes."""
        producer = Producer(producer_properties(self.kafka))
        codec = Codec()
        for index, (noun, record) in enumerate(log):
            message = to_message(record, codec, prefix=self.kafka.prefix, source="/test", noun=noun)
            producer.produce(
                message.topic,
                encode(index, record) if encode else message.value,
                message.key,
                timestamp=message.timestamp_ms,
                headers=list(message.headers),
                on_delivery=_acked,
            )
            producer.poll(0)
        assert producer.flush(60) == 0

    def built(self) -> int:
        """How many groups are built."""
        records = (self._codec.decode(value) for _, value in read_topic(self.kafka, "samples", self._counted_to))
        self._built |= {record.group_id for record in records if isinstance(record, GroupBuilt)}
        return len(self._built)

    def wait_built(self, groups: int) -> None:
        """Wait until so many groups are built."""
        wait_for(lambda: self.built() >= groups, f"{groups} groups are built")

    def wait_readable(self) -> None:
        """Wait until each topic has a leader again, which a broker takes a moment for after a freeze or a start."""
        nouns = (*SOURCES, "samples", "dead-letters")
        wait_for(lambda: all(is_readable(self.kafka, noun) for noun in nouns), "every topic has a leader")

    def wait_committed(self) -> None:
        """Wait until the source topics are committed to their ends."""
        wait_for(lambda: uncommitted(self.kafka, self.group, SOURCES) == 0, "all source records are committed")

    def samples(self) -> Samples:
        """What the trainer gets; a doubled record must be a twin."""
        found: Samples = {}
        for partition, value in read_topic(self.kafka, "samples"):
            record: Record = self._codec.decode(value)
            assert isinstance(record, Sample | GroupBuilt)
            identity = record.sample_id if isinstance(record, Sample) else record.group_id
            assert found.setdefault((partition, identity), value) == value
        return found

    def dead_letters(self) -> list[Record]:
        """All dead letters."""
        return [self._codec.decode(value) for _, value in read_topic(self.kafka, "dead-letters")]


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def _acked(error: object, message: object) -> None:
    assert error is None, error
