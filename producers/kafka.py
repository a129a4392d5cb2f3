"""The publisher that writes to Kafka, through librdkafka.

Where there is a schema registry, it is asked for the ids of all schemas once, in a thread; what is submitted before it has
answered waits, as for a broker. After that nothing depends on it.

A record that is too large for Kafka goes into the claim store first, for as long as it takes; meanwhile what comes later under
its key waits behind it, and what comes under other keys does not.

One thread polls librdkafka; acknowledgements are gathered there and handed to the event loop in one wake-up per batch, so a
message costs one small closure and no lock. `producer_properties` says why nothing is lost, doubled or reordered.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.kafka import producer_properties
from rollstream.producers.base import Submitted, acknowledged, quiet
from rollstream.schemas.envelope import Message, draft_message
from rollstream.schemas.records import Record
from rollstream.schemas.registry import open_codec
from rollstream.settings import ClaimSettings, KafkaSettings

_log = logging.getLogger(__name__)
_POLL_S = 0.2
"""Longest sleep of the poll thread with nothing to do; an acknowledgement wakes it at once."""
_ASK_AGAIN_S = 1.0
"""Pause before a registry that did not answer is asked again."""
_MOST_EARLY = 10_000
"""Records that wait for the registry; more are refused as a full queue."""
_STORE_AGAIN_S = 1.0
"""Pause before a claim is stored again after the store was down."""
_MOST_WAITING_BYTES = 256 << 20
"""Claims, and what waits behind them, in memory; more is refused as a full queue."""
_CLAIMS = ClaimSettings()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message that has to be stored first, or that stands behind one."""

    message: Message
    future: Submitted

    @property
    def size_bytes(self) -> int:
        claim = self.message.claim
        return len(self.message.value) + (0 if claim is None else len(claim.data))


class KafkaPublisher:
    """Writes records to Kafka; make it inside the event loop that uses it."""

    def __init__(
        self,
        kafka: KafkaSettings,
        claims: ClaimSettings = _CLAIMS,
        *,
        source: str = "/gateway",
        linger_ms: float = 2,
    ) -> None:
        """Args: source: CloudEvents source of the messages. linger_ms: see `producer_properties`."""
        self._codec = open_codec(kafka.registry_url, claims)
        self._early: list[tuple[Record, str | None, Submitted]] = []
        self._lacks: BrokerError | None = None
        self._lines: dict[bytes, deque[_Waiting]] = {}
        self._storing: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        self._prefix = kafka.prefix
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._problem: str | None = None
        self._done: deque[tuple[asyncio.Future[None], BrokerError | None]] = deque()
        self._is_waking = False
        self._is_closed = False
        with boundary(BrokerError, f"make a producer for {kafka.bootstrap!r}", reason="bad_settings"):
            properties = producer_properties(kafka, client_id="rollstream-gateway", linger_ms=linger_ms)
            self._producer = Producer({**properties, "error_cb": self._on_error})
        self._thread = threading.Thread(target=self._poll, name="kafka-poll", daemon=True)
        self._thread.start()
        self._learning = self._loop.create_task(self._learn()) if kafka.registry_url else None

    @property
    def problem(self) -> str | None:
        """As in `Publisher`: librdkafka met an error after which order can no longer be promised. Restart the process."""
        return self._problem

    @property
    def backlog(self) -> int:
        """As in `Publisher`."""
        return len(self._producer) + sum(len(line) for line in self._lines.values())

    def submit(self, record: Record, *, noun: str | None = None) -> asyncio.Future[None]:
        """As in `Publisher`."""
        name = type(record).__name__
        if self._is_closed or self._problem is not None:
            raise BrokerError(
                f"cannot write {name}: the producer is {self._problem or 'closed'}; restart this process",
                reason="fatal" if self._problem else "closed",
            )
        future = Submitted(loop=self._loop)
        future.add_done_callback(quiet)
        if self._learning is None:
            self._send(record, noun, future)
        elif len(self._early) < _MOST_EARLY:
            future.waits_for = self._lacks
            self._early.append((record, noun, future))
        else:
            raise BrokerError(
                f"cannot write {name}: {len(self._early)} records wait for the schema registry; look at kafka.registry_url",
                reason="queue_full",
            )
        return future

    async def _learn(self) -> None:
        """Ask the registry for the ids, again and again while it does not tell them; then send what has waited for them."""
        while True:
            try:
                await asyncio.to_thread(self._codec.learn)
            except (BrokerError, SchemaError) as error:
                _log.warning("records wait: %s", error)
                self._lacks = BrokerError(str(error), reason=error.reason)
                for _, _, future in self._early:
                    future.waits_for = self._lacks
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                break
        self._learning = None
        early, self._early = self._early, []
        for record, noun, future in early:
            future.waits_for = None
            try:
                self._send(record, noun, future)
            except (BrokerError, SchemaError) as error:
                if not future.done():
                    future.set_exception(error)

    def _send(self, record: Record, noun: str | None, future: Submitted) -> None:
        message = draft_message(record, self._codec, prefix=self._prefix, source=self._source, noun=noun)
        if message.claim is None and message.key not in self._lines:
            self._produce(message, future)
        else:
            self._queue(_Waiting(message, future))

    def _produce(self, message: Message, future: Submitted) -> None:
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
                f"cannot write to {message.topic!r}: librdkafka's queue of unacknowledged messages is full; look at the broker",
                reason="queue_full",
            ) from cause
        except KafkaException as cause:
            is_too_large = cause.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
            raise BrokerError(
                f"cannot write {len(message.value)} bytes to {message.topic!r}: {cause}",
                reason="too_large" if is_too_large else "refused",
            ) from cause

    def _queue(self, waiting: _Waiting) -> None:
        if self._waiting_bytes + waiting.size_bytes > _MOST_WAITING_BYTES:
            raise BrokerError(
                f"cannot write to {waiting.message.topic!r}: {self._waiting_bytes} bytes wait for the claim store; look at "
                "claims.store",
                reason="queue_full",
            )
        self._waiting_bytes += waiting.size_bytes
        key = waiting.message.key
        if key in self._lines:
            self._lines[key].append(waiting)
            return
        self._lines[key] = deque([waiting])
        task = self._loop.create_task(self._work_off(key))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _work_off(self, key: bytes) -> None:
        """Store and send what stands in the line of a key, in order."""
        line = self._lines[key]
        while line:
            await self._store(line[0])
            waiting = line.popleft()
            self._waiting_bytes -= waiting.size_bytes
            try:
                self._produce(waiting.message, waiting.future)
            except BrokerError as error:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
        del self._lines[key]

    async def _store(self, waiting: _Waiting) -> None:
        """Put a message's claim into the store, again and again while it is down: like a message that Kafka does not take."""
        while waiting.message.claim is not None:
            try:
                await self._codec.store_async(waiting.message.claim)
            except BrokerError as error:
                if waiting.future.waits_for is None:
                    _log.warning("a large record waits: %s", error)
                waiting.future.waits_for = error
                await asyncio.sleep(_STORE_AGAIN_S)
            else:
                waiting.future.waits_for = None
                return

    async def publish(self, record: Record, *, noun: str | None = None, timeout_s: float | None = None) -> None:
        """As in `Publisher`."""
        await acknowledged(self.submit(record, noun=noun), timeout_s)

    async def close(self, timeout_s: float = 10.0) -> None:
        """As in `Publisher`."""
        if not self._is_closed:
            deadline = self._loop.time() + timeout_s
            if self._learning is not None:
                await asyncio.wait([self._learning], timeout=timeout_s)
            if self._learning is not None:
                self._learning.cancel()
            if self._storing:
                await asyncio.wait(self._storing, timeout=max(deadline - self._loop.time(), 0.0))
            for task in self._storing:
                task.cancel()
            await asyncio.to_thread(self._producer.flush, max(deadline - self._loop.time(), 0.0))
            self._is_closed = True
            await asyncio.to_thread(self._thread.join)
            self._producer.purge()  # else librdkafka would go on trying for as long as the process lives
            self._producer.poll(0)
            self._hand_over()

    def _poll(self) -> None:
        while not self._is_closed:
            self._producer.poll(_POLL_S)

    def _on_delivery(self, future: asyncio.Future[None], error: KafkaError | None, message: Any) -> None:
        self._done.append((future, _problem_of(error, message)))
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._hand_over)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._done.clear()

    def _hand_over(self) -> None:
        self._is_waking = False
        while self._done:
            future, problem = self._done.popleft()
            if future.done():
                continue
            if problem is None:
                future.set_result(None)
            else:
                future.set_exception(problem)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._problem = f"stopped by a fatal error: {error.str()}"


def _problem_of(error: KafkaError | None, message: Any) -> BrokerError | None:
    """What a delivery report says is wrong. Success without an offset is librdkafka's guess from a later batch, no answer."""
    if error is not None:
        return BrokerError(f"Kafka refused a record: {error.str()}", reason=str(error.name()).strip("_").lower())
    offset = message.offset()
    if offset is None or offset < 0:
        return BrokerError(
            f"cannot tell whether {message.topic()!r} holds a record: it was acknowledged without an offset",
            reason="no_ack",
        )
    return None
