"""Published policies as the reader of the topic sees them; over a real broker: `tests/integration/test_gateway_kafka.py`."""

from __future__ import annotations

from typing import Any

from rollstream.producers.policy_log import PolicyLog
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import PolicyVersion
from rollstream.settings import KafkaSettings


class FakeMessage:
    """A message of the topic."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def value(self) -> bytes:
        return self._value

    def error(self) -> None:
        return None

    def offset(self) -> int:
        return 0

    def topic(self) -> str:
        return "policies"


class FakeConsumer:
    """Gives all its messages at once."""

    def __init__(self, *values: bytes) -> None:
        self._values = values

    def consume(self, count: int, timeout_s: float) -> list[FakeMessage]:
        return [FakeMessage(value) for value in self._values]


def test_foreign_bytes_among_the_policies_are_passed_over() -> None:
    """One message that nobody can read must neither end the gateway nor hide what was published."""
    record = PolicyVersion("default", 3, "/w/3", 1)
    encoded = Codec().encode(record)
    log = PolicyLog(KafkaSettings(), "default")
    consumer: Any = FakeConsumer(b"rubbish", encoded, encoded[:-2], b"\xc3\x01" + bytes(8) + encoded[10:])
    log._consumer = consumer

    found = log.wait(0.0)

    assert record == found
