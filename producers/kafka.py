"""The publisher that writes to Kafka, through librdkafka.

One thread polls librdkafka; acknowledgements are gathered there and handed to the event loop in one wake-up per batch, so a
message costs one small closure and no lock. `producer_properties` says why nothing is lost, doubled or reordered.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from rollstream.errors import BrokerError, boundary
from rollstream.kafka import producer_properties
from rollstream.producers.base import acknowledged, quiet
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import Record
from rollstream.schemas.registry import open_codec
from rollstream.settings import KafkaSettings

_POLL_S = 0.2
"""Longest sleep of the poll thread with nothing to do; an acknowledgement wakes it at once."""


class KafkaPublisher:
    """Writes records to Kafka; make it inside the event loop that uses it."""

    def __init__(self, kafka: KafkaSettings, *, source: str = "/gateway", linger_ms: float = 2) -> None:
        """Args: source: CloudEvents source of the messages. linger_ms: see `producer_properties`."""
        self._codec = open_codec(kafka.registry_url)
        self._prefix = kafka.prefix
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._problem: str | None = None
        self._done: deque[tuple[asyncio.Future[None], KafkaError | None]] = deque()
        self._is_waking = False
        self._is_closed = False
        with boundary(BrokerError, f"make a producer for {kafka.bootstrap!r}", reason="bad_settings"):
            properties = producer_properties(kafka, client_id="rollstream-gateway", linger_ms=linger_ms)
            self._producer = Producer({**properties, "error_cb": self._on_error})
        self._thread = threading.Thread(target=self._poll, name="kafka-poll", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """As in `Publisher`: librdkafka met an error after which order can no longer be promised. Restart the process."""
        return self._problem

    def submit(self, record: Record, *, noun: str | None = None) -> asyncio.Future[None]:
        """As in `Publisher`."""
        name = type(record).__name__
        if self._is_closed or self._problem is not None:
            raise BrokerError(
                f"cannot write {name}: the producer is {self._problem or 'closed'}; restart this process",
                reason="fatal" if self._problem else "closed",
            )
        message = to_message(record, self._codec, prefix=self._prefix, source=self._source, noun=noun)
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(quiet)
        try:
            self._producer.produce(
                message.topic,
                message.value,
                message.key,
                timestamp=message.timestamp_ms,
                headers=list(message.headers),
                on_delivery=partial(self._on_delivery, future),
            )
        except BufferError as cause:
            raise BrokerError(
                f"cannot write {name}: librdkafka's queue of unacknowledged messages is full; look at the broker",
                reason="queue_full",
            ) from cause
        except KafkaException as cause:
            is_too_large = cause.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
            raise BrokerError(
                f"cannot write {name} of {len(message.value)} bytes to {message.topic!r}: {cause}",
                reason="too_large" if is_too_large else "refused",
            ) from cause
        return future

    async def publish(self, record: Record, *, noun: str | None = None, timeout_s: float | None = None) -> None:
        """As in `Publisher`."""
        await acknowledged(self.submit(record, noun=noun), timeout_s)

    async def close(self, timeout_s: float = 10.0) -> None:
        """As in `Publisher`."""
        if not self._is_closed:
            await asyncio.to_thread(self._producer.flush, timeout_s)
            self._is_closed = True
            await asyncio.to_thread(self._thread.join)
            self._producer.purge()  # else librdkafka would go on trying for as long as the process lives
            self._producer.poll(0)
            self._hand_over()

    def _poll(self) -> None:
        while not self._is_closed:
            self._producer.poll(_POLL_S)

    def _on_delivery(self, future: asyncio.Future[None], error: KafkaError | None, _: Any) -> None:
        self._done.append((future, error))
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._hand_over)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._done.clear()

    def _hand_over(self) -> None:
        self._is_waking = False
        while self._done:
            future, error = self._done.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(BrokerError(f"Kafka refused a record: {error.str()}", reason=_reason(error)))

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._problem = f"stopped by a fatal error: {error.str()}"


def _reason(error: KafkaError) -> str:
    return str(error.name()).strip("_").lower()
