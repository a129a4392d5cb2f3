"""The loop: positions from the store, commits after writes, patience with a busy store. Driven without a broker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition
from prometheus_client import CollectorRegistry

from rollstream.errors import SinkError
from rollstream.sinks.base import Chunk, SinkBusy, Source
from rollstream.sinks.chunks import Chunker
from rollstream.sinks.commits import Commits
from rollstream.sinks.loop import SinkLoop
from rollstream.sinks.metrics import SinkMetrics

TOPIC = "t.calls.v1"
SOURCE = Source(TOPIC, 0, "id-1")


class Message:
    def __init__(self, offset: int, partition: int = 0) -> None:
        self._offset, self._partition = offset, partition

    def error(self) -> KafkaError | None:
        return None

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return b"x"

    def key(self) -> bytes:
        return b"k"

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_000


class OutOfRange(Message):
    """What librdkafka says when retention was faster than the reader."""

    def error(self) -> KafkaError:
        return KafkaError(KafkaError._AUTO_OFFSET_RESET)


class FakeConsumer:
    """Hands out what it is given, and remembers what was asked of it."""

    def __init__(self, watermarks: tuple[int, int] = (0, 100)) -> None:
        self.messages: deque[Message] = deque()
        self.watermarks = watermarks
        self.assigned: list[tuple[int, int]] = []
        self.committed: list[tuple[int, int]] = []
        self.on_commit: Callable[[Any, Sequence[Any]], None] = lambda *_: None
        self.refusal: KafkaError | None = None
        self.paused = False
        self.polls = 0

    def subscribe(self, topics: Sequence[str], **_: Any) -> None:
        self.topics = topics

    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int]:
        return self.watermarks

    def assign(self, partitions: Sequence[Any]) -> None:
        self.assigned = [(p.partition, p.offset) for p in partitions]

    def assignment(self) -> list[Any]:
        return []

    def pause(self, partitions: Sequence[Any]) -> None:
        self.paused = True

    def resume(self, partitions: Sequence[Any]) -> None:
        self.paused = False

    def consume(self, count: int, timeout: float) -> list[Message]:
        self.polls += 1
        found = [] if self.paused else list(self.messages)
        if not self.paused:
            self.messages.clear()
        return found

    def poll(self, timeout: float) -> None:
        self.polls += 1

    def commit(self, offsets: Sequence[Any], asynchronous: bool) -> None:
        self.committed += [(p.partition, p.offset) for p in offsets]
        self.on_commit(self.refusal, offsets)


class FakeSink:
    def __init__(self, positions: Mapping[Source, int] | None = None, busy: int = 0) -> None:
        self.stored = dict(positions or {})
        self.written: list[tuple[int, int]] = []
        self.busy = busy
        self.silent = 0

    def positions(self) -> Mapping[Source, int]:
        if self.silent:
            self.silent -= 1
            raise SinkBusy("away", retry_after_s=1)
        return self.stored

    def write(self, chunks: Sequence[Chunk]) -> int:
        if self.busy:
            self.busy -= 1
            raise SinkBusy("full", retry_after_s=1)
        self.written += [(chunk.first, chunk.last) for chunk in chunks]
        return sum(len(chunk.records) for chunk in chunks)

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _loop(consumer: FakeConsumer, sink: FakeSink, clock: Clock, ids: Mapping[str, str] | None = None) -> SinkLoop:
    metrics = SinkMetrics(CollectorRegistry())
    names = {TOPIC: "id-1"} if ids is None else ids
    commits = Commits()
    consumer.on_commit = commits.answered
    return SinkLoop(consumer, sink, Chunker(5, max_age_s=2), lambda: names, metrics, commits, clock)


def test_partition_starts_at_the_position_of_the_store() -> None:
    """Kafka's committed offsets decide nothing."""
    consumer, sink = FakeConsumer(), FakeSink({SOURCE: 42})

    _loop(consumer, sink, Clock()).assigned(consumer, [TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)])

    assert [(0, 42), (1, 0)] == consumer.assigned


def test_topic_made_anew_starts_at_its_beginning() -> None:
    """Another topic id is another log."""
    consumer, sink = FakeConsumer(), FakeSink({SOURCE: 42})

    _loop(consumer, sink, Clock(), {TOPIC: "id-2"}).assigned(consumer, [TopicPartition(TOPIC, 0)])

    assert [(0, 0)] == consumer.assigned


def test_position_behind_the_end_is_an_error() -> None:
    """A store of another cluster would skip records silently."""
    consumer, sink = FakeConsumer((0, 10)), FakeSink({SOURCE: 42})

    with pytest.raises(SinkError, match=r"cannot go on at offset 42 .* the log ends at 10"):
        _loop(consumer, sink, Clock()).assigned(consumer, [TopicPartition(TOPIC, 0)])


def test_position_behind_the_end_without_topic_ids_says_what_may_have_happened() -> None:
    """The embedded broker forgets its topics when it stops, and has no ids to tell the new ones by."""
    consumer, sink = FakeConsumer((0, 0)), FakeSink({Source(TOPIC, 0): 42})

    with pytest.raises(SinkError, match="the embedded broker forgets its topics when it stops") as caught:
        _loop(consumer, sink, Clock(), {}).assigned(consumer, [TopicPartition(TOPIC, 0)])

    assert "position_after_end" == caught.value.reason


def test_assignment_waits_for_a_store_that_is_away() -> None:
    """A rebalance during an outage costs no process: the partitions stay, paused, until their positions are known."""
    consumer, sink, clock = FakeConsumer(), FakeSink({SOURCE: 42}), Clock()
    sink.silent = 2
    loop = _loop(consumer, sink, clock)

    loop.assigned(consumer, [TopicPartition(TOPIC, 0)])
    was_paused, before = consumer.paused, sink.silent
    loop.step()
    clock.now_s = 1.0
    loop.step()
    still_paused = consumer.paused
    clock.now_s = 3.0
    loop.step()

    assert (was_paused, before, still_paused) == (True, 1, True)
    assert [(0, 42)] == consumer.assigned
    assert not consumer.paused


def test_partition_that_left_during_the_wait_is_not_started() -> None:
    """Another process owns it by then."""
    consumer, sink, clock = FakeConsumer(), FakeSink(), Clock()
    sink.silent = 1
    loop = _loop(consumer, sink, clock)
    loop.assigned(consumer, [TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)])

    loop.revoked(consumer, [TopicPartition(TOPIC, 0)])
    clock.now_s = 1.0
    loop.step()

    assert [(1, 0)] == consumer.assigned


def test_retention_that_overtakes_a_running_sink_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """No silent jump: an error in the log, a count of what is gone, and what was read before is stored."""
    consumer, sink = FakeConsumer((0, 100)), FakeSink()
    loop = _loop(consumer, sink, Clock())
    loop.assigned(consumer, [TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)])
    consumer.messages.extend([*(Message(i) for i in range(2)), Message(0, 1)])
    loop.step()
    consumer.watermarks = (50, 100)

    consumer.messages.extend([OutOfRange(-1), OutOfRange(-1)])
    loop.step()
    consumer.messages.append(Message(50))
    loop.step()
    loop.flush(timeout_s=1)

    assert [(0, 50), (1, 1)] == consumer.assigned
    assert loop._metrics.skipped._value.get() == 48
    assert "starts at offset 50, and 2 was to be stored next" in caplog.text
    assert [(0, 1), (50, 50), (0, 0)] == sink.written


def test_expired_records_are_counted_and_passed() -> None:
    """What retention took cannot be stored; it can be told."""
    consumer, sink = FakeConsumer((50, 100)), FakeSink({SOURCE: 42})
    loop = _loop(consumer, sink, Clock())

    loop.assigned(consumer, [TopicPartition(TOPIC, 0)])

    assert [(0, 50)] == consumer.assigned
    assert loop._metrics.skipped._value.get() == 8


def test_full_chunk_is_written_then_committed() -> None:
    """The commit follows the write, and names the next offset."""
    consumer, sink, clock = FakeConsumer(), FakeSink(), Clock()
    loop = _loop(consumer, sink, clock)
    loop.assigned(consumer, [TopicPartition(TOPIC, 0)])
    consumer.messages.extend(Message(i) for i in range(7))

    loop.step()

    assert [(0, 4)] == sink.written
    assert [(0, 5)] == consumer.committed


def test_commit_that_the_broker_did_not_take_is_made_again() -> None:
    """Else a sink at the end of its topics would be shown as behind until something new is written."""
    consumer, sink, clock = FakeConsumer(), FakeSink(), Clock()
    loop = _loop(consumer, sink, clock)
    loop.assigned(consumer, [TopicPartition(TOPIC, 0)])
    consumer.messages.extend(Message(i) for i in range(5))
    consumer.refusal = KafkaError(KafkaError.NOT_COORDINATOR)
    loop.step()
    consumer.refusal = None
    loop.step()
    too_early = list(consumer.committed)

    clock.now_s = 6.0
    loop.step()
    clock.now_s = 60.0
    loop.step()

    assert [(0, 5)] == too_early
    assert [(0, 5), (0, 5)] == consumer.committed


def test_tail_is_written_when_it_is_old_and_at_the_end() -> None:
    """Age cuts it; a stop cuts what came after."""
    consumer, sink, clock = FakeConsumer(), FakeSink(), Clock()
    loop = _loop(consumer, sink, clock)
    loop.assigned(consumer, [TopicPartition(TOPIC, 0)])
    consumer.messages.extend(Message(i) for i in range(2))
    loop.step()
    clock.now_s = 2.0
    loop.step()
    consumer.messages.append(Message(2))
    loop.step()

    loop.flush(timeout_s=1)

    assert [(0, 1), (2, 2)] == sink.written


def test_busy_store_pauses_reading_and_gets_the_same_chunk_again() -> None:
    """No offset moves, the consumer stays alive, and reading goes on afterwards."""
    consumer, sink, clock = FakeConsumer(), FakeSink(busy=2), Clock()
    loop = _loop(consumer, sink, clock)
    loop.assigned(consumer, [TopicPartition(TOPIC, 0)])
    consumer.messages.extend(Message(i) for i in range(5))

    loop.step()
    was_paused, polls = consumer.paused, consumer.polls
    clock.now_s = 0.5
    loop.step()
    clock.now_s = 1.0
    loop.step()
    clock.now_s = 3.0
    loop.step()

    assert was_paused
    assert consumer.polls == polls + 3
    assert [(0, 4)] == sink.written
    assert not consumer.paused


def test_revoked_partition_is_forgotten() -> None:
    """Its next owner reads again what was not stored."""
    consumer, sink, clock = FakeConsumer(), FakeSink(busy=1), Clock()
    loop = _loop(consumer, sink, clock)
    loop.assigned(consumer, [TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)])
    consumer.messages.extend([*(Message(i) for i in range(6)), Message(0, 1)])
    loop.step()

    loop.revoked(consumer, [TopicPartition(TOPIC, 0)])
    clock.now_s = 5.0
    loop.step()
    consumer.messages.append(Message(6))
    loop.step()

    assert [(0, 0)] == sink.written
    assert [(1, 1)] == consumer.committed


def test_stop_ends_in_time_with_a_store_that_stays_busy() -> None:
    """What it did not take is read again by the next process."""
    consumer, sink, clock = FakeConsumer(), FakeSink(busy=1_000), Clock()
    loop = _loop(consumer, sink, clock)
    loop.assigned(consumer, [TopicPartition(TOPIC, 0)])
    consumer.messages.append(Message(0))
    loop.step()
    consumer.poll = lambda timeout: setattr(clock, "now_s", clock.now_s + 1)  # type: ignore[method-assign]

    loop.flush(timeout_s=5)

    assert [] == sink.written
    assert [] == consumer.committed
