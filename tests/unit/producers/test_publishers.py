"""What holds for each publisher, without a broker; with one: `tests/integration/test_gateway_kafka.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollstream.errors import BrokerError
from rollstream.kafka import producer_properties
from rollstream.producers.base import Publisher, Submitted, acknowledged
from rollstream.producers.kafka import KafkaPublisher
from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import Message
from rollstream.schemas.records import CallDelivery, Delivery
from rollstream.settings import KafkaSettings
from tests.memory_claims import MemoryClaims

RECORD = CallDelivery("c", "r", 0, "g", Delivery.NONE, "ack_timeout", 5)
NOBODY = KafkaSettings(bootstrap="127.0.0.1:1", properties={"log_level": "0"})
"""Nothing listens on port 1."""
INLINE_BYTES = 1_000
WAIT_S = 30.0


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


class Parts:
    """A Kafka publisher whose claim store is in memory, and whose messages go into a list instead of to librdkafka."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rollstream.producers.kafka._STORE_AGAIN_S", 0.001)
        self.claims = MemoryClaims()
        self.publisher = KafkaPublisher(NOBODY)
        self.publisher._codec = Codec(claims=self.claims, inline_bytes=INLINE_BYTES)
        self.sent: list[str] = []
        self.is_full = False
        self.publisher._produce = self._produce  # type: ignore[method-assign]

    def _produce(self, message: Message, future: Submitted) -> None:
        if self.is_full:
            raise BrokerError("full", reason="queue_full")
        record = Codec(claims=self.claims).decode(message.value)
        assert isinstance(record, CallDelivery)
        self.sent.append(record.call_id)
        future.set_result(None)


def delivery(call_id: str, group_id: str = "g", *, is_large: bool = False) -> CallDelivery:
    return CallDelivery(call_id, "r", 0, group_id, Delivery.NONE, "x" * INLINE_BYTES if is_large else "x", 5)


async def test_large_record_is_stored_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledged means both: the claim is in the store, and the check for it in Kafka."""
    parts = Parts(monkeypatch)

    await parts.publisher.publish(delivery("large", is_large=True), timeout_s=WAIT_S)
    await parts.publisher.close(0.01)

    assert (["large"], 1) == (parts.sent, len(parts.claims.stored))


async def test_large_record_that_waits_holds_back_its_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the claim store is down, order under a key is kept, and everybody else goes on."""
    parts = Parts(monkeypatch)
    parts.claims.is_down = True
    waiting = [parts.publisher.submit(r) for r in (delivery("a", is_large=True), delivery("b"), delivery("c"))]
    await parts.publisher.publish(delivery("other", "h"), timeout_s=WAIT_S)
    before = [future.done() for future in waiting]

    parts.claims.is_down = False
    for future in waiting:
        await acknowledged(future, WAIT_S)
    await parts.publisher.publish(delivery("d"), timeout_s=WAIT_S)
    await parts.publisher.close(0.01)

    assert [False] * 3 == before
    assert ["other", "a", "b", "c", "d"] == parts.sent


async def test_claim_store_that_is_down_is_the_reason_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an acknowledgement that Kafka was never asked for; and the record is still queued."""
    parts = Parts(monkeypatch)
    parts.claims.is_down = True
    future = parts.publisher.submit(delivery("a", is_large=True))

    with pytest.raises(BrokerError) as error:
        await acknowledged(future, 0.05)
    parts.claims.is_down = False
    await acknowledged(future, WAIT_S)
    await parts.publisher.close(0.01)

    assert ("claims_down", ["a"]) == (error.value.reason, parts.sent)


async def test_claims_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is down for long costs refusals, not memory; and room comes back with it."""
    monkeypatch.setattr("rollstream.producers.kafka._MOST_WAITING_BYTES", 3 * INLINE_BYTES)
    parts = Parts(monkeypatch)
    parts.claims.is_down = True
    future = parts.publisher.submit(delivery("a", is_large=True))

    with pytest.raises(BrokerError) as error:
        _ = [parts.publisher.submit(delivery(f"b{n}", f"h{n}", is_large=True)) for n in range(3)]
    parts.claims.is_down = False
    await acknowledged(future, WAIT_S)
    await parts.publisher.publish(delivery("c", is_large=True), timeout_s=WAIT_S)
    await parts.publisher.close(0.01)

    assert "queue_full" == error.value.reason
    assert {"a", "c"} <= set(parts.sent)


async def test_stored_record_that_kafka_refuses_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it is told; what stands behind it goes on."""
    parts = Parts(monkeypatch)
    parts.is_full = True

    with pytest.raises(BrokerError) as error:
        await parts.publisher.publish(delivery("a", is_large=True), timeout_s=WAIT_S)
    parts.is_full = False
    await parts.publisher.publish(delivery("b", is_large=True), timeout_s=WAIT_S)
    await parts.publisher.close(0.01)

    assert ("queue_full", ["b"]) == (error.value.reason, parts.sent)


async def test_closing_waits_for_claims_and_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store takes in time is sent; what it does not take was not acknowledged to anybody."""
    parts = Parts(monkeypatch)
    future = parts.publisher.submit(delivery("a", is_large=True))
    await parts.publisher.close(WAIT_S)
    late = Parts(monkeypatch)
    late.claims.is_down = True
    never = late.publisher.submit(delivery("b", is_large=True))

    await late.publisher.close(0.05)

    assert (True, False) == (future.done(), never.done())
    assert (["a"], []) == (parts.sent, late.sent)


def test_producer_keeps_order_and_partitions_like_faust() -> None:
    """The settings that the promises rest on; a user's own properties win, but where a group lives is not theirs to say."""
    found = producer_properties(KafkaSettings(properties={"security.protocol": "ssl", "partitioner": "random"}))

    assert {
        "enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random", "message.timeout.ms": 0,
        "security.protocol": "ssl",
    }.items() <= found.items()  # fmt: skip
