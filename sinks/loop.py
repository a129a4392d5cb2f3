"""The loop of a sink: consume, chunk, write, commit. Knows Kafka's consumer by its calls, and no store.

Positions come from the store at every assignment; offsets committed to Kafka only show progress to its tools. While the
store is busy the partitions are paused and the consumer is polled, so that the group does not take the process for dead.
What retention takes before it is stored is counted and told, at an assignment as well as in between; the consumer must
be told `auto.offset.reset=error`, or it would jump there without a word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.errors import BrokerError, SinkError
from rollstream.kafka import watermarks
from rollstream.sinks.base import Chunk, LogRecord, Sink, SinkBusy, Source
from rollstream.sinks.chunks import Chunker
from rollstream.sinks.commits import Commits
from rollstream.sinks.metrics import SinkMetrics

log = logging.getLogger(__name__)

_POLL_S = 0.5
_FETCH_RECORDS = 1_000
_MAX_HELD_BYTES = 256 << 20
_MAX_WAIT_S = 30.0
_STOP_S = 10.0
_BROKER_S = 30.0
_PASSING = {"broker_down", "claims_down"}
"""Reasons of what a sink waits for, as it does for its store."""


class SinkLoop:
    """Feeds one sink from one consumer.

    Args:
        consumer: a confluent-kafka consumer that is not subscribed yet.
        sink: the store.
        chunker: cuts chunks.
        topic_ids: the broker's topic ids by topic name; empty if it has none.
        metrics: counters.
        commits: gets the consumer's `on_commit`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        consumer: Any,
        sink: Sink,
        chunker: Chunker,
        topic_ids: Callable[[], Mapping[str, str]],
        metrics: SinkMetrics,
        commits: Commits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._sink = sink
        self._chunker = chunker
        self._topic_ids = topic_ids
        self._metrics = metrics
        self._commits = commits
        self._clock = clock
        self._sources: dict[tuple[str, int], Source] = {}
        self._unplaced: list[Any] = []
        self._pending: list[list[Chunk]] = []
        self._pending_bytes = 0
        self._wait_s = 0.0
        self._retry_at_s: float | None = None

    def run(self, topics: Sequence[str], should_stop: Callable[[], bool]) -> None:
        """Read topics until told to stop, then store what is held.

        Raises: SinkError: the store refuses for good. BrokerError: the broker does.
        """
        self._consumer.subscribe(list(topics), on_assign=self.assigned, on_revoke=self.revoked)
        while not should_stop():
            self.step()
        self.flush(_STOP_S)

    def step(self) -> None:
        """Read once, and write what is ready."""
        self._place()
        for message in self._consumer.consume(_FETCH_RECORDS, self._timeout_s()):
            self._take(message)
        self._queue_each(self._chunker.due(self._clock()))
        if self._chunker.size_bytes > _MAX_HELD_BYTES:
            self._queue_each(self._chunker.flush())
        self._write_pending()
        self._commit()
        self._metrics.held.set(self._chunker.size_bytes + self._pending_bytes)

    def flush(self, timeout_s: float) -> None:
        """Store what is held; what a busy store does not take in time is read again by the next one."""
        self._queue_each(self._chunker.flush())
        deadline_s = self._clock() + timeout_s
        while self._pending and self._clock() < deadline_s:
            self._write_pending()
            if self._pending:
                self._consumer.poll(min(_POLL_S, self._wait_s))
        self._commit()

    def assigned(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Start the partitions at the positions of the store; while it cannot tell them they are paused."""
        self._wait_s, self._retry_at_s = 0.0, None
        self._unplaced = list(partitions)
        if not self._place():
            consumer.assign(list(partitions))
            consumer.pause(list(partitions))

    def revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Forget partitions: their next owner reads again what was not stored."""
        gone = {(partition.topic, partition.partition) for partition in partitions}
        self._commits.forget(gone)
        self._chunker.drop([self._sources.pop(key) for key in gone if key in self._sources])
        self._unplaced = [p for p in self._unplaced if (p.topic, p.partition) not in gone]
        kept = [
            [chunk for chunk in batch if (chunk.source.topic, chunk.source.partition) not in gone]
            for batch in self._pending
        ]
        self._pending = [batch for batch in kept if batch]
        self._pending_bytes = sum(chunk.size_bytes for batch in self._pending for chunk in batch)

    def _place(self) -> bool:
        """Give the partitions that wait for it their start. Returns: False if store or broker cannot tell it now."""
        if not self._unplaced:
            return True
        if self._retry_at_s is not None and self._clock() < self._retry_at_s:
            return False
        try:
            starts = self._starts(self._unplaced)
        except (SinkBusy, BrokerError) as error:
            self._back_off(error)
            return False
        for partition, source in zip(self._unplaced, starts, strict=True):
            partition.offset = starts[source]
            self._sources[partition.topic, partition.partition] = source
            self._chunker.start(source, partition.offset)
        self._consumer.assign(self._unplaced)
        self._consumer.resume(self._unplaced)
        self._unplaced, self._wait_s, self._retry_at_s = [], 0.0, None
        return True

    def _starts(self, partitions: Sequence[Any]) -> dict[Source, int]:
        """The offset that each partition goes on at, in their order."""
        positions, ids = self._sink.positions(), self._topic_ids()
        sources = [Source(p.topic, p.partition, ids.get(p.topic, "")) for p in partitions]
        return {source: self._start_offset(source, positions.get(source)) for source in sources}

    def _start_offset(self, source: Source, position: int | None) -> int:
        """Where to go on. Args: position: what is to be stored next; None if nothing of the partition is stored."""
        low, high = watermarks(self._consumer, source.topic, source.partition, _BROKER_S)
        if position is None:
            return low
        if position > high:
            why = (
                "its end was cut off, or this store belongs to another cluster: use an empty store"
                if source.topic_id
                else "this broker has no topic ids, so either the topic was made anew (the embedded broker forgets its topics "
                "when it stops), or this store belongs to another cluster: use an empty store"
            )
            raise SinkError(
                f"cannot go on at offset {position} of {source.topic} partition {source.partition}: the log ends at {high}; "
                f"{why}",
                reason="position_after_end",
            )
        if position < low:
            log.error(
                "%s partition %d starts at offset %d, and %d was to be stored next: retention was faster",
                source.topic,
                source.partition,
                low,
                position,
            )
            self._metrics.skipped.inc(low - position)
        return max(position, low)

    def _out_of_range(self, source: Source) -> None:
        """Go on where the log begins now: it has dropped what was to be read next.

        The consumer has given the partition up, so it cannot seek; it is assigned everything anew.
        """
        from confluent_kafka import TopicPartition

        self._chunker.skip(source, self._start_offset(source, self._chunker.next_offset(source)))
        partitions = [
            TopicPartition(s.topic, s.partition, self._chunker.next_offset(s)) for s in self._sources.values()
        ]
        self._consumer.assign(partitions)
        if self._wait_s:
            self._consumer.pause(partitions)

    def _take(self, message: Any) -> None:
        from confluent_kafka import KafkaError

        error = message.error()
        source = self._sources.get((message.topic(), message.partition()))
        if error is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                if source is not None:
                    self._out_of_range(source)
                return
            if error.retriable() or not error.fatal():
                log.warning("consumer: %s", error)
                return
            raise BrokerError(f"cannot read topics: {error}", reason="broker_down")
        if source is None:
            return  # the last messages of a partition that is gone
        record = LogRecord(message.offset(), message.value() or b"", message.key(), max(message.timestamp()[1], 0))
        for chunk in self._chunker.add(source, record, self._clock()):
            self._queue([chunk])

    def _queue_each(self, chunks: list[Chunk]) -> None:
        if chunks:
            self._queue(chunks)

    def _queue(self, batch: list[Chunk]) -> None:
        self._pending.append(batch)
        self._pending_bytes += sum(chunk.size_bytes for chunk in batch)

    def _write_pending(self) -> None:
        while self._pending and (self._retry_at_s is None or self._clock() >= self._retry_at_s):
            batch = self._pending[0]
            started_s = self._clock()
            try:
                rows = self._sink.write(batch)
            except (SinkBusy, BrokerError) as error:
                self._pause(error)
                return
            self._pending.pop(0)
            self._pending_bytes -= sum(chunk.size_bytes for chunk in batch)
            self._count(batch, rows, self._clock() - started_s)
            self._commits.add(batch)
            self._resume()

    def _pause(self, error: SinkBusy | BrokerError) -> None:
        was_waiting = bool(self._wait_s)
        self._back_off(error)
        if not was_waiting:
            self._consumer.pause(self._consumer.assignment())

    def _back_off(self, error: SinkBusy | BrokerError) -> None:
        """Wait before the next try, twice as long as the last time.

        Raises: BrokerError: waiting will not help.
        """
        if isinstance(error, BrokerError) and error.reason not in _PASSING:
            raise error
        retry_after_s = error.retry_after_s if isinstance(error, SinkBusy) else _POLL_S
        self._wait_s = min(max(self._wait_s * 2, retry_after_s), _MAX_WAIT_S)
        self._retry_at_s = self._clock() + self._wait_s
        self._metrics.busy.inc()
        log.warning("%s; trying again in %g s", error, self._wait_s)

    def _resume(self) -> None:
        if self._wait_s:
            self._consumer.resume(self._consumer.assignment())
        self._wait_s, self._retry_at_s = 0.0, None

    def _commit(self) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        offsets = [TopicPartition(*place, offset) for place, offset in self._commits.due(self._clock()).items()]
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            log.warning("offsets are stored, and Kafka did not take their commit: %s", error)

    def _count(self, batch: Sequence[Chunk], rows: int, took_s: float) -> None:
        self._metrics.records.inc(sum(len(chunk.records) for chunk in batch))
        self._metrics.rows.inc(rows)
        self._metrics.write_s.observe(took_s)
        newest_ms = max(chunk.records[-1].time_ms for chunk in batch)
        self._metrics.age_s.set(time.time() - newest_ms / 1000)

    def _timeout_s(self) -> float:
        return _POLL_S if self._retry_at_s is None else max(0.0, min(_POLL_S, self._retry_at_s - self._clock()))
