"""What holds for each publisher, without a broker; with one: `tests/integration/test_gateway_kafka.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from rollstream.errors import BrokerError
from rollstream.kafka import producer_properties
from rollstream.producers.base import Publisher
from rollstream.producers.kafka import KafkaPublisher
from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.records import CallDelivery, Delivery
from rollstream.settings import KafkaSettings

RECORD = CallDelivery("c", "r", 0, "g", Delivery.NONE, "ack_timeout", 5)
NOBODY = KafkaSettings(bootstrap="127.0.0.1:1", properties={"log_level": "0"})
"""Nothing listens on port 1."""


@pytest.fixture(params=["memory", "kafka"])
async def unreachable(request: pytest.FixtureRequest) -> AsyncIterator[Publisher]:
    """A publisher whose broker is away."""
    publisher: Any = MemoryPublisher() if request.param == "memory" else KafkaPublisher(NOBODY)
    if request.param == "memory":
        publisher.held = True
    yield publisher
    await publisher.close(0.01)


async def test_missing_acknowledgement_is_an_error_and_the_record_stays_queued(unreachable: Publisher) -> None:
    """`publish` gives up waiting; what it queued is not taken back."""
    future = unreachable.submit(RECORD)

    with pytest.raises(BrokerError) as error:
        await unreachable.publish(RECORD, timeout_s=0.02)

    assert "ack_timeout" == error.value.reason
    assert not future.done()


async def test_closed_kafka_publisher_refuses() -> None:
    """Nothing is queued where nobody will send it."""
    publisher = KafkaPublisher(NOBODY)
    await publisher.close(0.01)

    with pytest.raises(BrokerError) as error:
        publisher.submit(RECORD)

    assert "closed" == error.value.reason


async def test_record_that_is_too_large_says_so() -> None:
    """Sending it again would not help, so it must not look like a broker that is away."""
    publisher = KafkaPublisher(NOBODY)

    with pytest.raises(BrokerError) as error:
        publisher.submit(replace(RECORD, reason="x" * 9_000_000))
    await publisher.close(0.01)

    assert "too_large" == error.value.reason


def test_producer_keeps_order_and_partitions_like_faust() -> None:
    """The settings that the promises rest on; a user's own properties win, but where a group lives is not theirs to say."""
    found = producer_properties(KafkaSettings(properties={"security.protocol": "ssl", "partitioner": "random"}))

    assert {
        "enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random", "message.timeout.ms": 0,
        "security.protocol": "ssl",
    }.items() <= found.items()  # fmt: skip
