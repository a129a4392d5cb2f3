"""What sinks on Apache Kafka are given in tests: the whole log of `tests/unit/sinks/chain.py`; and how long they may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from confluent_kafka import Producer

from rollstream.kafka import producer_properties
from rollstream.process import ServiceProcess
from rollstream.schemas.envelope import to_message
from rollstream.settings import KafkaSettings
from tests.unit.sinks.chain import CODEC, Log

WAIT_S = 120.0


def produce(kafka: KafkaSettings, log: Log) -> None:
    """Write every topic by key, as the parts before the sinks do."""
    producer = Producer(producer_properties(kafka))
    for noun, records in log.records.items():
        for record in records:
            message = to_message(record, CODEC, prefix=kafka.prefix, source="/test", noun=noun)
            producer.produce(message.topic, message.value, key=message.key, timestamp=message.timestamp_ms)
    assert producer.flush(WAIT_S) == 0


def wait(condition: Callable[[], bool], what: str, process: ServiceProcess | None = None) -> None:
    """Wait until something holds. Args: process: whose log is shown if it does not."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        log = process.log_tail() if process else ""
        assert time.monotonic() < deadline_s, f"timed out waiting until {what}\n{log}"
        threading.Event().wait(0.1)
