"""Reads the policies topic, so that an engine in a gateway serves what was last published, after a restart and in every replica.

An engine that holds its weights in this process starts from its folder; which weights are due stands in the log.
Each reader sees the whole topic by itself (no consumer group): there are few records, and the topic keeps the newest.
"""

from __future__ import annotations

import logging
import time

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.kafka import client_properties
from rollstream.schemas.records import PolicyVersion
from rollstream.schemas.registry import open_codec
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings

_log = logging.getLogger(__name__)
_OPEN_S = 5.0
"""Least time for opening the topic."""
_FETCH_WAIT_MS = 1_000
"""The broker may hold an empty fetch this long; weights come every few seconds at most."""


class PolicyLog:
    """The published versions of one policy. Its methods block: call them in a thread, one at a time."""

    def __init__(self, kafka: KafkaSettings, policy: str) -> None:
        """Args: policy: whose versions to read."""
        self._kafka = kafka
        self._policy = policy
        self._codec = open_codec(kafka.registry_url, None)
        self._consumer: Consumer | None = None

    def newest(self, timeout_s: float) -> PolicyVersion | None:
        """Read to the end that the topic has now. Returns: the last record; None if there is none.

        Raises: BrokerError: the broker does not answer in time.
        """
        name = topics()["policies"].name(self._kafka.prefix)
        deadline = time.monotonic() + timeout_s
        with boundary(BrokerError, f"read topic {name} at {self._kafka.bootstrap}", reason="broker_down"):
            consumer = Consumer(
                {
                    "group.id": "rollstream-gateway",
                    "enable.auto.commit": False,
                    "fetch.wait.max.ms": _FETCH_WAIT_MS,
                    **client_properties(self._kafka, client_id="rollstream-gateway-policies"),
                }
            )
            partitions = consumer.list_topics(name, timeout=timeout_s).topics[name].partitions
            left = {}
            for partition in partitions:
                low, high = consumer.get_watermark_offsets(TopicPartition(name, partition), timeout=timeout_s)
                if high > low:
                    left[partition] = high
            consumer.assign([TopicPartition(name, partition, OFFSET_BEGINNING) for partition in partitions])
            found = None
            self._consumer = consumer
            while left:
                if time.monotonic() > deadline:
                    self.close()
                    raise BrokerError(f"cannot read topic {name} to its end in {timeout_s:g} s", reason="broker_down")
                found = self.wait(0.2) or found
                for at in consumer.position([TopicPartition(name, partition) for partition in left]):
                    if at.offset >= left[at.partition]:
                        del left[at.partition]
        return found

    def wait(self, timeout_s: float) -> PolicyVersion | None:
        """Wait for further records; one that cannot be read is reported and passed over.

        Returns: the last of those that came; None if none did.

        Raises: BrokerError: the topic could not be read before, and cannot now.
        """
        if self._consumer is None:
            return self.newest(max(timeout_s, _OPEN_S))
        found = None
        for message in self._consumer.consume(100, timeout_s):
            value = message.value()
            if message.error() is None and value is not None:
                try:
                    record = self._codec.decode(value)
                except SchemaError:
                    _log.warning("offset %s of %s is no policy", message.offset(), message.topic(), exc_info=True)
                    continue
                if isinstance(record, PolicyVersion) and record.policy == self._policy:
                    found = record
        return found

    def close(self) -> None:
        """Let go of the connection."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
