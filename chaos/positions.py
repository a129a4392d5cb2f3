"""How far everything is: ends of the logs, committed offsets, copies in sync; and when a fault's victim works again.

One thread looks while somebody waits, every half second: recovery times are no finer than that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaException, TopicPartition

from rollstream.kafka import client_properties
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings

Where = tuple[str, int]
"""Noun of a topic, partition."""

_LOOK_S = 0.5
_ANSWER_S = 5.0
_LATEST = -1  # as a time stamp: the end of the log


@dataclass(frozen=True, slots=True)
class Positions:
    """One look at the cluster."""

    begun_s: float
    """When it was begun; monotonic clock. What it shows is not older."""
    ends: Mapping[Where, int]
    """The offset after the last record of each partition."""
    committed: Mapping[str, Mapping[Where, int]]
    """Committed offsets by consumer group; 0 where there is none."""
    behind: frozenset[int]
    """Brokers that lack a copy in sync of some partition."""

    def has_passed(self, group: str, ends: Mapping[Where, int], nouns: frozenset[str] | None = None) -> bool:
        """Whether a consumer group has committed up to these ends. Args: nouns: the topics that count; None for all."""
        return not self.lag(group, ends, nouns)

    def lag(self, group: str, ends: Mapping[Where, int], nouns: frozenset[str] | None = None) -> dict[Where, int]:
        """How many offsets a consumer group has not committed before these ends, where there are any."""
        lags = {where: end - self.committed[group].get(where, 0) for where, end in ends.items()}
        return {where: lag for where, lag in lags.items() if lag > 0 and (nouns is None or where[0] in nouns)}


class Observer:
    """Asks Kafka for positions. Args: groups: the consumer groups to ask about."""

    def __init__(self, kafka: KafkaSettings, groups: tuple[str, ...]) -> None:
        self._nouns = {topic.name(kafka.prefix): noun for noun, topic in topics().items()}
        self._wanted = [
            TopicPartition(name, partition)
            for name, noun in self._nouns.items()
            for partition in range(topics()[noun].partitions(kafka.partitions))
        ]
        # Not an AdminClient: librdkafka 2.16 aborts the process when a broker goes away under its list_offsets.
        self._consumers = {group: Consumer(_properties(kafka, group)) for group in groups}

    def look(self) -> Positions | None:
        """The positions now; None if the brokers do not say."""
        begun_s = time.monotonic()
        any_consumer = next(iter(self._consumers.values()))
        try:
            found = any_consumer.list_topics(timeout=_ANSWER_S)
            at_end = [TopicPartition(p.topic, p.partition, _LATEST) for p in self._wanted]
            ends = self._offsets(any_consumer.offsets_for_times(at_end, timeout=_ANSWER_S))
            groups = {
                group: self._offsets(consumer.committed(self._wanted, timeout=_ANSWER_S))
                for group, consumer in self._consumers.items()
            }
        except KafkaException:
            return None
        behind = {
            broker
            for topic in found.topics.values()
            for partition in topic.partitions.values()
            for broker in set(partition.replicas) - set(partition.isrs)
        }
        return Positions(begun_s, ends, groups, frozenset(behind))

    def close(self) -> None:
        """Close the connections."""
        for consumer in self._consumers.values():
            consumer.close()

    def _offsets(self, found: list[TopicPartition]) -> dict[Where, int]:
        for partition in found:
            if partition.error is not None:
                raise KafkaException(partition.error)
        return {(self._nouns[p.topic], p.partition): max(p.offset, 0) for p in found}


def _properties(kafka: KafkaSettings, group: str) -> dict[str, object]:
    return {
        **client_properties(kafka, client_id="chaos-observer"),
        "group.id": group,
        "log_level": 0,
        "reconnect.backoff.max.ms": 1_000,
        "topic.metadata.refresh.interval.ms": 5_000,
    }


Back = Callable[[Positions, Positions], bool]
"""Whether the victim works again, from the first look after the fault and the newest one."""


@dataclass(slots=True)
class Recovery:
    """The wait for a victim to work again."""

    since_s: float
    """The moment that its time counts from; monotonic clock."""
    over_s: float
    """When the fault was over: what was seen before proves nothing."""
    is_back: Back | Callable[[], bool]
    """What is waited for; without arguments, it needs no look at Kafka."""
    needs_look: bool
    """Whether `is_back` is about positions."""
    took_s: float | None = None
    """How long it took; None: not seen yet."""
    _first: Positions | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def see(self, positions: Positions | None) -> None:
        """Take a look into account."""
        if not self.needs_look:
            if self.is_back():  # type: ignore[call-arg]
                self._end()
        elif positions is not None and positions.begun_s >= self.over_s:
            self._first = self._first or positions
            if self.is_back(self._first, positions):  # type: ignore[call-arg]
                self._end()

    def wait(self, stop: threading.Event) -> None:
        """Return once it works again, or at `stop`."""
        while not stop.is_set() and not self._done.wait(_LOOK_S):
            continue

    def _end(self) -> None:
        self.took_s = time.monotonic() - self.since_s
        self._done.set()


class Watcher:
    """Looks for all recoveries that are waited for; a context manager around its thread.

    Args: patience_s: who is not back after this long is not waited for any more.
    """

    def __init__(self, observer: Observer, patience_s: float = 180.0) -> None:
        self._observer = observer
        self._patience_s = patience_s
        self._waiting: list[Recovery] = []
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher")

    def add(self, recovery: Recovery) -> Recovery:
        """Watch out for this one, too."""
        with self._lock:
            self._waiting.append(recovery)
        return recovery

    def look(self) -> Positions | None:
        """The positions now, for whom else they concern."""
        with self._looking:
            return self._observer.look()

    def looks(self, timeout_s: float) -> Iterator[Positions | None]:
        """The positions again and again, until the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and not self._stop.wait(_LOOK_S):
            yield self.look()

    def wait_for_all(self, timeout_s: float) -> None:
        """Return once nobody is waited for any more, or after the time."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and not self._stop.wait(_LOOK_S):
            with self._lock:
                if not self._waiting:
                    return

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            with self._lock:
                waiting = list(self._waiting)
            positions = self.look() if any(r.needs_look for r in waiting) else None
            for recovery in waiting:
                recovery.see(positions)
            oldest_s = time.monotonic() - self._patience_s
            with self._lock:
                self._waiting = [r for r in self._waiting if r.took_s is None and r.over_s > oldest_s]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._observer.close()
