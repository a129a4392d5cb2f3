"""All partitions of a processor process: assignment, records, work, ticks, offsets. Every decision is in `partition`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faust.types import TP

from rollstream.errors import BrokerError
from rollstream.processors.base import Stage
from rollstream.processors.shell.admission import Admission, Kinds
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.hosted import Running
from rollstream.processors.shell.outbox import Outbox
from rollstream.processors.shell.partition import Mark, Partition
from rollstream.processors.shell.stats import Stats
from rollstream.processors.shell.transport import End
from rollstream.schemas.codec import Codec
from rollstream.schemas.topics import topics
from rollstream.settings import Settings

_TICK_S = 1.0
_ANY_PARTITION = 0  # for the stages that are only asked which topics they read


@dataclass(frozen=True, slots=True)
class View:
    """One partition number, for metrics."""

    number: int
    """Partition number."""
    held: Mapping[str, int]
    """Topic noun → events held."""
    lag: Mapping[str, int]
    """Topic noun → events not read yet."""
    oldest_ms: int | None
    """Append time of the oldest held event."""


class Shell:
    """The handler behind the transport. Made and used inside the app's event loop."""

    def __init__(
        self,
        settings: Settings,
        stages_for: Callable[[int], list[Stage]],
        codec: Codec,
        *,
        max_work: int = 16,
        kinds: Kinds | None = None,
    ) -> None:
        """
        Args:
            stages_for: fresh stages for a partition number.
            max_work: most works (scorers) that run at once.
            kinds: which records each topic may hold; None takes every record.
        """
        self.stats = Stats()
        """Counts since the start."""
        self.views: tuple[View, ...] = ()
        """What metrics tell of each partition; replaced whole, every second."""
        self.epoch = 0
        """Raised with every assignment and revocation."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told why the process cannot go on; the app sets it."""
        self.outbox = Outbox(self.fail, codec.store_async)
        """What is sent."""
        self._settings = settings
        self._stages_for = stages_for
        self._codec = codec
        self._kinds = kinds
        self._guard = DeadLetterGuard(settings.processor.dead_letter_limit)
        nouns = dict.fromkeys(noun for stage in stages_for(_ANY_PARTITION) for noun in (*stage.inputs, stage.output))
        self.topic_of = {noun: topics()[noun].name(settings.kafka.prefix) for noun in nouns}
        """Topic noun → topic, of all topics read."""
        self._noun_of = {topic: noun for noun, topic in self.topic_of.items()}
        self._partitions: dict[int, Partition] = {}
        self._work_slots = asyncio.Semaphore(max_work)
        self._works: set[asyncio.Task[None]] = set()
        self._committed: dict[int, dict[str, Mark]] = {}
        self._ticked_at = 0.0

    def assigned(self, assigned: set[TP], counts: Mapping[str, int | None]) -> None:
        """Start anew with these partitions.

        Args: counts: topic → number of partitions it has in all.
        Raises: BrokerError: reason `not_copartitioned`.
        """
        self.revoked()
        numbers = {topic: {tp.partition for tp in assigned if tp.topic == topic} for topic in self._noun_of}
        if len({frozenset(of_topic) for of_topic in numbers.values()}) > 1 or len(set(counts.values())) > 1:
            told = {topic: f"{sorted(of_topic)} of {counts.get(topic)}" for topic, of_topic in numbers.items()}
            raise BrokerError(
                f"cannot process: the topics' partitions differ: {told}; expected the same numbers of each. Create all "
                "topics of the family with one partition count, and run every worker of the group with the same stages",
                reason="not_copartitioned",
            )
        admission = Admission(next(iter(counts.values()), None), self._kinds)
        for number in sorted(set().union(*numbers.values())):
            self._partitions[number] = Partition(
                number,
                self._stages_for(number),
                self._codec,
                prefix=self._settings.kafka.prefix,
                guard=self._guard,
                stats=self.stats,
                admission=admission,
            )

    def revoked(self) -> None:
        """Everything is gone; rebalances are eager, also for what comes back."""
        self.epoch += 1
        for partition in self._partitions.values():
            partition.revoke()
        for task in self._works:
            task.cancel()
        self._partitions.clear()
        self._committed.clear()
        self.outbox.clear()
        self.views = ()

    @property
    def has_room(self) -> bool:
        """Whether more records may come."""
        return self.outbox.has_room

    async def room(self) -> None:
        """Wait until they may."""
        await self.outbox.room()

    def own_outputs(self) -> Sequence[TP]:
        """The partitions that gates wait for."""
        return [TP(self.topic_of[noun], p.number) for p in self._partitions.values() for noun in p.own_outputs]

    def wanted(self, active: set[TP]) -> set[TP]:
        """Own outputs first: what they show to be done need not be held, nor built again and kept behind the gate."""
        first = {
            p.number: {self.topic_of[noun] for noun in gates}
            for p in self._partitions.values()
            if (gates := p.closed_gates)
        }
        return {tp for tp in active if tp.partition not in first or tp.topic in first[tp.partition]}

    def begin(
        self, positions: Mapping[TP, int], ends: Mapping[TP, int], finished: Mapping[TP, int] | None = None
    ) -> None:
        """Where reading starts, the ends that the gates wait for, and what is read for a stage's memory alone."""
        for number, partition in self._partitions.items():
            partition.begin(
                {noun: positions[tp] for noun, tp in self._tps(number)},
                {noun: ends[tp] for noun, tp in self._tps(number) if tp in ends},
                {noun: finished[tp] for noun, tp in self._tps(number) if tp in finished} if finished else None,
            )
            self._collect(partition)

    async def take(self, tp: TP, records: Sequence[Any]) -> None:
        """Records of one partition, in order. What a claim check among them names is read first, without blocking the others."""
        partition, fed = self._partitions[tp.partition], 0
        for at, record in enumerate(records):
            if record.value and self._codec.is_claim(record.value):
                self.feed(tp, records[fed:at])
                fed = at
                await self._codec.read_ahead(record.value)
                if partition.is_revoked:
                    return
        self.feed(tp, records[fed:])

    def feed(self, tp: TP, records: Sequence[Any]) -> None:
        """Records of one partition."""
        partition = self._partitions[tp.partition]
        partition.feed(self._noun_of[tp.topic], records)
        self._collect(partition)

    def passed(self, ends: Mapping[TP, End]) -> None:
        """The readers' positions; and, every second, time passes."""
        for tp, end in ends.items():
            self._partitions[tp.partition].passed(self._noun_of[tp.topic], end.position, end.caught_up_ms)
        is_tick = time.monotonic() - self._ticked_at >= _TICK_S
        if is_tick:
            self._ticked_at = time.monotonic()
            self.views = tuple(self._view(partition, ends) for partition in self._partitions.values())
        for partition in self._partitions.values():
            if is_tick:
                partition.tick()
            self._collect(partition)

    def offsets(self) -> Mapping[TP, Mark]:
        """Marks of every partition number in which one has moved: always all of a number, see `Partition.marks`."""
        moved: dict[TP, Mark] = {}
        for number, partition in self._partitions.items():
            marks = partition.marks()
            if marks != self._committed.get(number):
                moved.update({tp: marks[noun] for noun, tp in self._tps(number) if noun in marks})
        return moved

    def committed(self, offsets: Mapping[TP, Mark]) -> None:
        """The broker has them."""
        for tp, mark in offsets.items():
            if tp.partition in self._partitions:
                self._committed.setdefault(tp.partition, {})[self._noun_of[tp.topic]] = mark

    def fail(self, error: BaseException) -> None:
        """End the process."""
        if self.on_failure is None:
            raise error
        self.on_failure(error)

    def _tps(self, number: int) -> Iterator[tuple[str, TP]]:
        return ((noun, TP(topic, number)) for noun, topic in self.topic_of.items())

    def _view(self, partition: Partition, ends: Mapping[TP, End]) -> View:
        lag = {noun: ends[tp].lag for noun, tp in self._tps(partition.number) if tp in ends}
        return View(partition.number, partition.held, lag, partition.oldest_ms)

    def _collect(self, partition: Partition) -> None:
        while partition.work:
            task = asyncio.ensure_future(self._run(partition, partition.work.popleft()))
            self._works.add(task)
            task.add_done_callback(self._work_ended)
        if partition.outbox:
            self.outbox.add(partition.outbox)
            partition.outbox.clear()

    async def _run(self, partition: Partition, running: Running) -> None:
        async with self._work_slots:
            result = await running.work.run()
        partition.work_done(running, result)
        self._collect(partition)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._works.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
