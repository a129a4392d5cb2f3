"""What holds for each publisher, without a broker; with one: `tests/integration/test_gateway_kafka.py`."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollstream.errors import BrokerError
from rollstream.kafka import producer_properties
from rollstream.producers.base import Publisher, Submitted, acknowledged
from rollstream.producers.kafka import KafkaPublisher
from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.codec import CLASSES, Codec, SchemaFile, schema_files
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


class SlowRegistry:
    """Answers when it is told to; whoever asks waits."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.refusals = 0
        self.asked: list[str] = []

    def schema_id(self, schema: SchemaFile) -> int:
        assert threading.current_thread() is not threading.main_thread(), "the event loop waits for the registry"
        assert self.may_answer.wait(WAIT_S)
        if self.refusals:
            self.refusals -= 1
            raise BrokerError("the registry is away", reason="registry_down")
        self.asked.append(schema.record)
        return len(self.asked)

    def schema_text(self, schema_id: int) -> str:
        return schema_files()[self.asked[schema_id - 1], 1].text


def _with_registry(monkeypatch: pytest.MonkeyPatch, registry: SlowRegistry) -> tuple[KafkaPublisher, list[str]]:
    """A publisher that asks a registry, and what it has given to librdkafka."""
    monkeypatch.setattr("rollstream.producers.kafka._ASK_AGAIN_S", 0.001)
    monkeypatch.setattr("rollstream.producers.kafka.open_codec", lambda url, claims: Codec(registry))
    publisher = KafkaPublisher(NOBODY.model_copy(update={"registry_url": "http://registry"}))
    sent: list[str] = []

    def produce(message: Message, future: Submitted) -> None:
        sent.append(Codec(registry).decode(message.value).call_id)  # type: ignore[attr-defined]
        future.set_result(None)

    publisher._produce = produce  # type: ignore[method-assign]
    return publisher, sent


async def test_records_wait_in_order_for_a_registry_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop does not: what is submitted meanwhile is sent once the ids are known, and then nobody is asked again."""
    registry = SlowRegistry()
    publisher, sent = _with_registry(monkeypatch, registry)
    futures = [publisher.submit(delivery(name)) for name in ("a", "b")]
    with pytest.raises(BrokerError) as error:
        await acknowledged(futures[0], 0.02)
    before = list(sent)

    registry.may_answer.set()
    for future in futures:
        await acknowledged(future, WAIT_S)
    asked = len(registry.asked)
    await publisher.publish(delivery("c"), timeout_s=WAIT_S)
    await publisher.close(0.01)

    assert ("ack_timeout", []) == (error.value.reason, before)
    assert ["a", "b", "c"] == sent
    assert asked == len(registry.asked) == len(CLASSES)


async def test_registry_that_is_away_is_asked_again_and_is_the_reason_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not an acknowledgement that Kafka was never asked for; and the record is still queued."""
    registry = SlowRegistry()
    registry.refusals = 10_000_000
    registry.may_answer.set()
    publisher, sent = _with_registry(monkeypatch, registry)
    future = publisher.submit(delivery("a"))

    with pytest.raises(BrokerError) as error:
        await acknowledged(future, 0.2)
    registry.refusals = 0
    await acknowledged(future, WAIT_S)
    await publisher.close(0.01)

    assert ("registry_down", ["a"]) == (error.value.reason, sent)


async def test_record_that_the_registry_kept_waiting_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is bounded."""
    monkeypatch.setattr("rollstream.producers.kafka._MOST_EARLY", 1)
    registry = SlowRegistry()
    publisher, _ = _with_registry(monkeypatch, registry)
    publisher.submit(delivery("a"))

    with pytest.raises(BrokerError) as error:
        publisher.submit(delivery("b"))
    registry.may_answer.set()
    await publisher.close(WAIT_S)

    assert "queue_full" == error.value.reason


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
