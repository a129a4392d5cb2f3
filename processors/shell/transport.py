"""The thin layer on Faust: whole batches out, an explicit map of offsets in.

Faust's agents spend 90 % of the time in per-message machinery and commit wrong offsets when acknowledgements come out of
order. This replaces `Consumer._drain_messages` and `Consumer.force_commit` of the aiokafka driver; membership, assignment,
signals, commit timer, threads and shutdown stay Faust's. The price is private parts of Faust and aiokafka: both are pinned
exactly, and `tests/unit/processors/shell/test_transport.py` fails when one of them moves.

Why the generation is checked inside the consumer's thread: a fetch that began before a rebalance returns records of the
new assignment. They carry the generation they belong to, and are handed back (by seeking) if nobody can take them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import aiokafka
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import CommitFailedError, IllegalStateError
from aiokafka.structs import RecordMetadata, TopicPartition
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode.threads import ServiceThread, WorkerThread

from rollstream.errors import BrokerError, boundary
from rollstream.processors.shell.membership import Membership
from rollstream.processors.shell.partition import Mark

_FETCH_WAIT_MS = 100  # aiokafka asks a broker for the next records only when the last request is answered
_FETCH_BYTES = (
    16 * 1024 * 1024
)  # an answer is in memory whole, beside the records made of it; Kafka's default is 50 MiB
_COMMIT_S = 120.0  # longer than the producer waits; whoever can commit nothing for so long works in vain
_FETCH_TIMEOUT_S = 0.5  # the longest time between two ticks


@dataclass(frozen=True, slots=True)
class End:
    """Where the reader stands in one partition."""

    position: int
    """The next offset it reads."""
    caught_up_ms: int | None
    """Wall clock at which `position` was known to be the end; None while behind."""
    lag: int = 0
    """Events not read yet."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One answer of the consumer's thread."""

    generation: int
    """Generation of the group that the records belong to."""
    records: Mapping[TP, Sequence[Any]] = field(default_factory=dict)
    """Records by partition, in log order."""
    ends: Mapping[TP, End] = field(default_factory=dict)
    """Where the reader stands after them, for every assigned partition."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading starts after an assignment."""

    generation: int
    """Generation of the group; -1 if the partitions are gone again."""
    positions: Mapping[TP, int] = field(default_factory=dict)
    """Offset read first, for every assigned partition."""
    ends: Mapping[TP, int] = field(default_factory=dict)
    """Ends of the own outputs."""
    finished: Mapping[TP, int] = field(default_factory=dict)
    """What was committed as finished, of the own outputs."""


class Handler(Protocol):
    """Who gets the records. All calls come from the app's event loop."""

    @property
    def epoch(self) -> int:
        """Another number after each assignment; a static member may get two under one generation."""

    @property
    def has_room(self) -> bool:
        """Whether more records may come."""

    async def room(self) -> None:
        """Wait until more records may come."""

    def own_outputs(self) -> Sequence[TP]:
        """Partitions whose ends must be known before the first record."""

    def wanted(self, active: set[TP]) -> set[TP]:
        """Which of the active partitions to read now; the others wait."""

    def begin(self, positions: Mapping[TP, int], ends: Mapping[TP, int], finished: Mapping[TP, int]) -> None:
        """A new assignment: where reading starts; of `own_outputs` the ends, and what was committed as finished."""

    async def take(self, tp: TP, records: Sequence[Any]) -> None:
        """Records of one partition; may wait for what they name, and takes none after an assignment meanwhile."""

    def passed(self, ends: Mapping[TP, End]) -> None:
        """All records of an answer were fed; the readers stand here."""

    def offsets(self) -> Mapping[TP, Mark]:
        """What to commit, in one request."""

    def committed(self, offsets: Mapping[TP, Mark]) -> None:
        """The broker has taken the offsets."""


class _DaemonThread(WorkerThread):
    """A thread that does not hold back the end of the process, whatever it waits for."""

    def __init__(self, service: ServiceThread, **kwargs: Any) -> None:
        super().__init__(service, **kwargs)
        self.daemon = True


class ConsumerThread(driver.AIOKafkaConsumerThread):
    """Faust's consumer thread, with answers that say to which generation and end of log they belong."""

    Worker = _DaemonThread

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answered: dict[TP, tuple[int, int]] = {}

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = _FETCH_WAIT_MS  # Faust fixes it at 1500
        consumer._fetch_max_bytes = _FETCH_BYTES
        consumer._fetch_min_bytes = self.app.fetch_min_bytes  # type: ignore[attr-defined]
        return consumer

    async def on_start(self) -> None:
        await super().on_start()
        coordinator, conf = self._ensure_consumer()._coordinator, self.app.conf
        if isinstance(coordinator, GroupCoordinator):
            member = Membership(
                coordinator._send_req, conf.consumer_group_instance_id, conf.broker_session_timeout, self.crash
            )
            coordinator._send_req = member.send

    async def fetch(self, active: set[TP]) -> Fetched:
        """The next records of the active partitions; none after a while without any."""
        return cast(Fetched, await self.call_thread(self._fetch, self._ensure_consumer(), active))

    async def start_of(self, own_outputs: Sequence[TP]) -> Start:
        """Where reading starts."""
        return cast(Start, await self.call_thread(self._start_of, self._ensure_consumer(), own_outputs))

    async def commit_in(self, generation: int, offsets: Mapping[TP, Mark]) -> bool:
        """Commit, unless the group has moved on."""
        if self.should_stop:  # crashed, and nobody is there to answer
            return False
        return cast(bool, await self.call_thread(self._commit_in, generation, offsets))

    async def _fetch(self, consumer: aiokafka.AIOKafkaConsumer, active: set[TP]) -> Fetched:
        paused = consumer.paused()
        consumer.pause(*(tp for tp in consumer.assignment() if tp not in active and tp not in paused))
        consumer.resume(*(tp for tp in paused if tp in active))
        records = await self._fetch_records(
            consumer, active, timeout=_FETCH_TIMEOUT_S, max_records=consumer._max_poll_records
        )
        generation = consumer._coordinator.generation
        if records and not self.consumer.flow_active:
            # Nobody takes them now, and without a committed offset no later seek would bring them back.
            for tp, batch in records.items():
                consumer.seek(tp, batch[0].offset)
            return Fetched(generation)
        return Fetched(generation, {TP(*tp): batch for tp, batch in records.items()}, self._ends(consumer))

    def _ends(self, consumer: aiokafka.AIOKafkaConsumer) -> dict[TP, End]:
        subscription = consumer._fetcher._subscriptions.subscription
        assignment = subscription.assignment if subscription is not None else None
        ends: dict[TP, End] = {}
        if assignment is None or not assignment.active:
            return ends
        for aiokafka_tp in assignment.tps:
            state = assignment.state_value(aiokafka_tp)
            if not state.has_valid_position:
                continue
            tp, answer_ms = TP(*aiokafka_tp), state.timestamp or 0
            last, before = self._answered.get(tp, (0, 0))
            if answer_ms != last:
                before, self._answered[tp] = last, (answer_ms, last)
            # The broker gave the answer at some moment after the one before it was received; so this is proven for then.
            is_end = bool(before) and state.highwater is not None and state.position >= state.highwater
            lag = max((state.highwater or 0) - state.position, 0)
            ends[tp] = End(state.position, before if is_end else None, lag)
        return ends

    async def _start_of(self, consumer: aiokafka.AIOKafkaConsumer, own_outputs: Sequence[TP]) -> Start:
        self._answered.clear()
        coordinator = consumer._coordinator
        generation = coordinator.generation
        try:
            positions = {TP(*tp): await consumer.position(tp) for tp in consumer.assignment()}
            firsts = await consumer.beginning_offsets(list(positions)) if positions else {}
            ends = await consumer.end_offsets(list(own_outputs)) if own_outputs else {}
            committed = await coordinator.fetch_committed_offsets([TopicPartition(*tp) for tp in own_outputs])
        except IllegalStateError:  # a rebalance took the partitions meanwhile
            return Start(-1)
        for tp, first in firsts.items():
            if positions[TP(*tp)] < first:
                self.log.error(
                    "%s: offsets %d to %d were deleted before they were processed; raise the topic's retention, and "
                    "look for what they held with `rollstream audit`",
                    tp, positions[TP(*tp)], first - 1,
                )  # fmt: skip
        finished = {TP(*tp): read_finished(found.metadata) for tp, found in committed.items()}
        return Start(generation, positions, {TP(*tp): end for tp, end in ends.items()}, finished)

    async def _commit_in(self, generation: int, offsets: Mapping[TP, Mark]) -> bool:
        consumer = self._ensure_consumer()
        if consumer._coordinator.generation != generation:
            return False
        commits = {TopicPartition(*tp): (mark.offset, finished_text(mark)) for tp, mark in offsets.items()}
        try:
            with boundary(BrokerError, "commit offsets", reason="no_commit"):
                async with asyncio.timeout(_COMMIT_S):
                    await consumer.commit(commits)
        except BrokerError as error:
            if not isinstance(error.__cause__, CommitFailedError):  # the group has moved on
                await self.crash(error)
            return False
        return True


class Consumer(driver.Consumer):
    """Faust's consumer, giving batches to `app.handler`."""

    _thread: ConsumerThread

    def _new_consumer_thread(self) -> ConsumerThread:
        return ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _drain_messages(self, fetcher: Any) -> None:
        handler: Handler = self.app.handler  # type: ignore[attr-defined]
        self._begun = (-1, -1)
        try:
            while not (self.should_stop or fetcher.should_stop):
                if not handler.has_room:
                    await self.wait_first(handler.room(), self.suspend_flow.wait())
                elif not self.flow_active:
                    await self.wait(self.can_resume_flow)  # type: ignore[arg-type]
                elif active := handler.wanted(self._get_active_partitions()):
                    await self._take(handler, await self._thread.fetch(active))
                else:
                    await self.sleep(_FETCH_TIMEOUT_S)
        except self.consumer_stopped_errors:
            if not self.app.should_stop:
                raise
        except asyncio.CancelledError:
            if not self.app.should_stop:
                raise
        except Exception as error:  # whatever it is, going on would skip events
            self.log.exception("cannot go on: %s", error)
            await self.app.crash(error)
            raise

    async def _take(self, handler: Handler, fetched: Fetched) -> None:
        epoch = handler.epoch
        if self._begun != (fetched.generation, epoch):
            start = await self._thread.start_of(handler.own_outputs())
            is_same = (start.generation, handler.epoch) == (fetched.generation, epoch)
            if not (is_same and self._is_current(start.generation)):
                return
            # Where records have come already, reading started at the first of them.
            firsts = {tp: batch[0].offset for tp, batch in fetched.records.items()}
            handler.begin({**start.positions, **firsts}, start.ends, start.finished)
            self._begun = (start.generation, epoch)
        for tp, batch in fetched.records.items():
            if handler.epoch != epoch or not self._is_current(fetched.generation):
                return
            await handler.take(tp, batch)
            await asyncio.sleep(0)
        if handler.epoch == epoch and self._is_current(fetched.generation):
            handler.passed(fetched.ends)

    def _is_current(self, generation: int) -> bool:
        """Whether records of a generation may still be used; if not, the next assignment reads them again."""
        return self.flow_active and not self.should_stop and self.app.consumer_generation_id == generation

    async def force_commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Commit what the handler says, in one request."""
        handler: Handler = self.app.handler  # type: ignore[attr-defined]
        generation, offsets = self.app.consumer_generation_id, handler.offsets()
        if not offsets or (generation, handler.epoch) != getattr(self, "_begun", None):
            return False
        if not await self._thread.commit_in(generation, offsets):
            return False
        handler.committed(offsets)
        return True

    async def verify_all_partitions_active(self) -> None:
        """Nothing: Faust's check takes held offsets for a hanging worker. The metrics tell the oldest held event."""


_FINISHED = "finished="


def finished_text(mark: Mark) -> str:
    """What is committed beside an offset, as Kafka's commit metadata; nothing where it says nothing."""
    return f"{_FINISHED}{mark.finished}" if mark.finished > mark.offset else ""


def read_finished(metadata: str | None) -> int:
    """The same back; 0 where nothing was said, or by somebody else."""
    text = (metadata or "").removeprefix(_FINISHED)
    return int(text) if text.isdigit() else 0


class Producer(driver.Producer):
    """Faust's producer, idempotent unless the settings say otherwise, with times in whole milliseconds.

    Order within a partition does not depend on it: aiokafka has one batch a partition under way. Without it a retry may
    double a record, and the twin has the same identity and bytes.
    """

    def _settings_extra(self) -> Mapping[str, Any]:
        return {"acks": "all", "enable_idempotence": self.app.is_idempotent}  # type: ignore[attr-defined]

    async def send_ms(
        self,
        topic: str,
        key: bytes,
        value: bytes,
        partition: int | None,
        timestamp_ms: int,
        headers: Sequence[tuple[str, bytes]],
    ) -> Awaitable[RecordMetadata]:
        """Queue a message; what is returned completes with the broker's acknowledgement.

        Faust's own `send` takes the time in seconds and loses a millisecond now and then by rounding.
        """
        sent = await self._ensure_producer().send(
            topic, value, key=key, partition=partition, timestamp_ms=timestamp_ms, headers=list(headers)
        )
        return cast(Awaitable[RecordMetadata], sent)


class Transport(driver.Transport):
    """The aiokafka transport with the two above."""

    Consumer = Consumer
    Producer = Producer
