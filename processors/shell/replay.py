"""One partition number built again from its inputs: the stages run as in a worker, over a log that has an end. Pure.

It hosts the same `Partition` as a worker. What that wants to send is acknowledged at once and read back, as if the broker were
instant. Two replays of equal inputs give equal bytes in equal order, because nothing depends on how fast anything is:

* Inputs of several topics come in one fixed order, see `merged`.
* Results of scorers are taken in the order in which they were started, and only when as many run as may, or at the end.
* A score's `latency_ms` is 0: it is the one field that a clock would write.

Time passes as it did for a worker that kept up: at every new second of the append times, everything appended before has been
read. Not where what is read had happened long before it was appended, as in a log that was copied all at once, or behind an
outage: that is a backlog, in which time stands still, for a worker too. At the end it passes to when the log was last written,
so what was open then stays open, and what waits for something that is not there is not given up: it may stand behind that end.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from rollstream.errors import SchemaError
from rollstream.processors.base import Stage
from rollstream.processors.shell.admission import Admission
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.hosted import Running
from rollstream.processors.shell.messages import Incoming, Outgoing
from rollstream.processors.shell.partition import Partition
from rollstream.processors.shell.stats import Stats
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms, to_message
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import DeadLetter, GroupBuilt, Score
from rollstream.schemas.topics import topics
from rollstream.snapshot import Logged

BACKLOG_MS = 60_000
"""How long after it happened a record may be appended in a log whose worker keeps up: longer than a producer's retries."""

_TICK_MS = 1_000  # as often as a worker
_ONLY = 0  # the partition of the dead letters, which have one

M = TypeVar("M", bound=Incoming)


class Replay:
    """One partition number, from no state to the end of its inputs.

    Args:
        number: partition number.
        stages: fresh ones, in pipeline order.
        topic_of: input noun → full name of the topic that is read; dead letters name it.
        prefix: of the topics that are written.
        write: takes each record, in order, with the offset that it gets in a topic that was empty.
        dead: how many dead letters were written before, by other partitions.
        admission: which records are taken; None takes all.
        max_work: most scorers that run at once.
    """

    def __init__(
        self,
        number: int,
        stages: list[Stage],
        codec: Codec,
        *,
        topic_of: Mapping[str, str],
        prefix: str,
        write: Callable[[Logged], None],
        guard: DeadLetterGuard,
        stats: Stats | None = None,
        dead: int = 0,
        admission: Admission | None = None,
        max_work: int = 16,
    ) -> None:
        self.stats = stats or Stats()
        """Counts."""
        self.written: Counter[str] = Counter({"dead-letters": dead})
        """Topic noun → records written."""
        self.groups: set[bytes] = set()
        """Keys of the records read."""
        self.built: set[bytes] = set()
        """Groups whose samples were written."""
        self._number = number
        self._codec = codec
        self._topic_of = topic_of
        self._prefix = prefix
        self._write = write
        self._partition = Partition(
            number, stages, codec, prefix=prefix, guard=guard, stats=self.stats, admission=admission
        )
        self._max_work = max_work
        self._works: deque[tuple[Running, asyncio.Future[object]]] = deque()
        self._next = dict.fromkeys(self._partition.nouns, 0)
        self._now_ms = 0
        self._ticked_ms = 0
        self._noun_of = {topic.name(prefix): topic.noun for topic in topics().values()}

    @property
    def held(self) -> dict[str, int]:
        """Input noun → records that something open still holds."""
        return {noun: self._partition.held[noun] for noun in self._topic_of}

    def begin(self, firsts: Mapping[str, int]) -> None:
        """Args: firsts: input noun → offset that is read first."""
        self._next.update(firsts)
        self._partition.begin(self._next, dict.fromkeys(self._partition.own_outputs, 0))
        self._pass(0)

    async def read(self, noun: str, message: Incoming) -> None:
        """The next input, in the order of `merged`."""
        if message.timestamp // _TICK_MS > self._ticked_ms // _TICK_MS:
            self._ticked_ms = message.timestamp
            if self._is_of_its_time(message):
                await self._tick(message.timestamp // _TICK_MS * _TICK_MS)
        self._now_ms = max(self._now_ms, message.timestamp)
        if message.key is not None:
            self.groups.add(message.key)
        self._partition.feed(noun, [message])
        self._next[noun] = message.offset + 1
        self._settle()
        while len(self._works) >= self._max_work:
            await self._take_result()
        if self._works:
            await asyncio.sleep(0)

    async def end(self, ends: Mapping[str, int], now_ms: int) -> None:
        """All inputs are read.

        Args: ends: input noun → the end that was read to; now_ms: when anything was last appended to any of them.
        """
        self._next.update(ends)
        self._now_ms = max(self._now_ms, now_ms)
        has_settled = False
        while not has_settled:
            while self._works:
                await self._take_result()
            before = self.written.total()
            await self._tick(self._now_ms)
            has_settled = not self._works and self.written.total() == before

    def close(self) -> None:
        """Let go of everything, also of scorers that run."""
        self._partition.revoke()
        for _, result in self._works:
            result.cancel()

    def _is_of_its_time(self, message: Incoming) -> bool:
        try:
            happened_ms = event_time_ms(self._codec.decode(message.value or b""))
        except SchemaError:
            return False
        return message.timestamp - happened_ms < BACKLOG_MS

    async def _tick(self, now_ms: int) -> None:
        self._pass(now_ms)
        self._partition.tick()
        self._settle()

    def _pass(self, now_ms: int) -> None:
        for noun, offset in self._next.items():
            self._partition.passed(noun, offset, now_ms)

    async def _take_result(self) -> None:
        running, future = self._works.popleft()
        result = await future
        if isinstance(result, Score):
            result = replace(result, latency_ms=0)
        self._partition.work_done(running, result)
        self._settle()

    def _settle(self) -> None:
        """Send, acknowledge and read back until nothing more comes, then start the scorers that are asked for."""
        outbox = self._partition.outbox
        while outbox:
            outgoing = self._named(outbox.popleft())
            noun = self._noun_of[outgoing.message.topic]
            number = _ONLY if outgoing.partition is None else outgoing.partition
            message = outgoing.message
            written = Logged(
                message.topic, number, self.written[noun], self._now_ms, message.key, message.value, message.headers
            )
            self.written[noun] += 1
            if message.claim is not None:
                self._codec.store(message.claim)
            self._write(written)
            outgoing.on_ack(outgoing, written.offset)
            if isinstance(outgoing.record, GroupBuilt):
                self.built.add(message.key)
            if noun in self._next:
                self._partition.feed(noun, [written])
                self._next[noun] = written.offset + 1
        while self._partition.work:
            running = self._partition.work.popleft()
            self._works.append((running, asyncio.ensure_future(running.work.run())))

    def _named(self, outgoing: Outgoing) -> Outgoing:
        """A dead letter of an input names the topic that the input stands in, which may have another prefix."""
        letter = outgoing.record
        if not isinstance(letter, DeadLetter):
            return outgoing
        topic = self._topic_of.get(self._noun_of[letter.topic])
        if topic is None or topic == letter.topic:
            return outgoing
        identity = digest_json([topic, letter.partition, letter.offset, letter.boundary, letter.reason])
        letter = replace(letter, topic=topic, dead_letter_id=identity)
        message = to_message(letter, self._codec, prefix=self._prefix, source=f"/{letter.boundary}")
        return Outgoing(message, outgoing.partition, letter, outgoing.on_ack)


def merged(inputs: Mapping[str, Iterable[M]]) -> Iterator[tuple[str, M]]:
    """Messages of several topics in one order: by append time, then noun; each topic's in its own order of offsets.

    Where a topic's append times go back, as after a change of its leader, a message counts as appended with the newest before it.
    """

    def timed(noun: str, messages: Iterable[M]) -> Iterator[tuple[int, str, int, M]]:
        newest_ms = 0
        for message in messages:
            newest_ms = max(newest_ms, message.timestamp)
            yield newest_ms, noun, message.offset, message

    streams = [timed(noun, messages) for noun, messages in sorted(inputs.items())]
    for _, noun, _, message in heapq.merge(*streams, key=lambda one: one[:3]):
        yield noun, message
