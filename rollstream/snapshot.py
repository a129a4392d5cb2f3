"""Topics as they stand at one moment, read from Kafka without a consumer group: nobody's position moves.

`bounds` says what a topic holds now; `read_range` reads a part of one partition, and never past what `bounds` said. Used by
`rollstream dlq` and `rollstream rebuild`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstream.errors import BrokerError, boundary
from rollstream.kafka import client_properties, watermarks
from rollstream.settings import KafkaSettings

if TYPE_CHECKING:
    from confluent_kafka import Consumer

_BROKER_S = 30.0
_SILENCE_S = 60.0  # longer than any election of a leader
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Logged:
    """A record as it stands in a log."""

    topic: str
    """Full name of its topic."""
    partition: int
    """Its partition."""
    offset: int
    """Its offset."""
    timestamp: int
    """When the broker appended it, UTC epoch milliseconds."""
    key: bytes | None
    """Its key."""
    value: bytes | None
    """Its bytes."""
    headers: tuple[tuple[str, bytes], ...] = ()
    """Its headers."""


def open_reader(kafka: KafkaSettings, client_id: str) -> Consumer:
    """A consumer that is told what to read, and commits nothing. The caller closes it."""
    from confluent_kafka import Consumer

    return Consumer(
        {
            **client_properties(kafka, client_id=client_id),
            "group.id": client_id,  # the client wants one; nothing ever joins it
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "queued.max.messages.kbytes": 16_384,
            "fetch.wait.max.ms": 100,
        }
    )


def partition_counts(consumer: Consumer, names: Iterable[str]) -> dict[str, int]:
    """Topic → number of its partitions; a topic that is not there is left out.

    Raises: BrokerError: reason `broker_down`.
    """
    with boundary(BrokerError, "list topics", reason="broker_down"):
        found = consumer.list_topics(timeout=_BROKER_S).topics
    return {name: len(found[name].partitions) for name in names if name in found}


def bounds(consumer: Consumer, topic: str, partitions: int) -> dict[int, tuple[int, int]]:
    """Partition → first offset that is there, and the one after the last.

    Raises: BrokerError: the topic is gone, or its brokers do not answer.
    """
    return {number: watermarks(consumer, topic, number, _BROKER_S) for number in range(partitions)}


def read_range(consumer: Consumer, topic: str, partition: int, first: int, end: int) -> Iterator[Logged]:
    """The records of a partition from `first` up to and without `end`, in order. The consumer reads nothing else meanwhile.

    Raises: BrokerError: the broker refuses, is silent for a minute, or deleted what was to be read.
    """
    from confluent_kafka import TopicPartition

    if first >= end:
        return
    where = f"{topic} partition {partition}"
    with boundary(BrokerError, f"read {where}", reason="broker_down"):
        consumer.assign([TopicPartition(topic, partition, first)])
    heard_s, at = time.monotonic(), first
    while True:
        with boundary(BrokerError, f"read {where}", reason="broker_down"):
            messages = consumer.consume(min(_AT_ONCE, end - at), timeout=0.5)
        if messages:
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s > _SILENCE_S:
            raise BrokerError(
                f"cannot read {where}: nothing came for {_SILENCE_S:g} s, and the log goes on to offset {end - 1}; see "
                "whether its brokers are up",
                reason="broker_down",
            )
        for message in messages:
            if message.error() is not None:
                if _is_end(message.error(), where):
                    return
                continue
            logged = _logged(message)
            if logged.offset < end:
                yield logged
            at = logged.offset + 1
            if at >= end:
                return


def _is_end(error: Any, where: str) -> bool:
    """Whether an error says that the log ends; False for what the client gets over by itself."""
    from confluent_kafka import KafkaError

    if error.code() == KafkaError._PARTITION_EOF:
        return True
    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise BrokerError(
            f"cannot read {where}: {error}; retention deleted it in the meantime: start again, and raise the topic's "
            "retention before",
            reason="deleted",
        )
    if error.fatal() or error.code() in (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
    ):
        raise BrokerError(f"cannot read {where}: {error}; see whether it is there and may be read", reason="refused")
    return False


def _logged(message: Any) -> Logged:
    return Logged(
        message.topic(),
        message.partition(),
        message.offset(),
        max(message.timestamp()[1], 0),
        message.key(),
        message.value(),
        tuple((name, value or b"") for name, value in message.headers() or ()),
    )
