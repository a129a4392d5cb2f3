"""Everything of one partition number: its stages, who holds which event, what waits to be sent.

Pure but for the callbacks it is given: records come in through `feed`, messages and work go out through `outbox` and
`work`, acknowledgements come back through `Outgoing.on_ack`. After `revoke` every late callback is ignored, so an object of
this class is one epoch of its partition.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from rollstream.errors import SchemaError, StageError
from rollstream.processors.base import Emit, Event, Position, Reject, Stage, Step
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.hosted import Hosted, Running, host
from rollstream.processors.shell.ledger import Ledger
from rollstream.processors.shell.messages import Incoming, Outgoing, dead_letter, read_used, used_header
from rollstream.processors.shell.stats import Stats
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms, to_message
from rollstream.schemas.records import Record
from rollstream.schemas.topics import topics

_REMEMBERED = 2_000  # own records kept between acknowledgement and read-back; later ones are decoded again


class Partition:
    """One partition number of all hosted topics, from assignment to revocation."""

    def __init__(
        self,
        number: int,
        stages: list[Stage],
        codec: Codec,
        *,
        prefix: str = "rollstream",
        guard: DeadLetterGuard | None = None,
        stats: Stats | None = None,
    ) -> None:
        """Args: stages: fresh ones, in pipeline order; prefix: of topic names."""
        self.number = number
        self.outbox: deque[Outgoing] = deque()
        """Messages to send, in order."""
        self.work: deque[Running] = deque()
        """Work to start."""
        self.is_revoked = False
        """Whether the partition belongs to somebody else by now."""
        self._codec = codec
        self._prefix = prefix
        self._guard = guard or DeadLetterGuard(1.0)
        self._stats = stats or Stats()
        self._hosted = host(stages)
        self._readers: dict[str, list[Hosted]] = {}
        self._owners: dict[str, Hosted] = {}
        for hosted in self._hosted:
            for noun in hosted.stage.inputs:
                self._readers.setdefault(noun, []).append(hosted)
            self._readers.setdefault(hosted.stage.output, [])
            if hosted.stage.reads_own_output:
                self._owners[hosted.stage.output] = hosted
            else:
                hosted.is_open = True
        self._ledgers = {noun: Ledger() for noun in self._readers}
        self._masks = {
            noun: sum(h.bit for h in readers) + (self._owners[noun].bit if noun in self._owners else 0)
            for noun, readers in self._readers.items()
        }
        self._waiting: dict[str, list[tuple[int, int, Position, Mapping[str, int]]]] = {n: [] for n in self._readers}
        self._ticket = count()
        self._sent: dict[Position, tuple[bytes, Record]] = {}
        self._caught_up_ms: dict[str, int | None] = {}
        self._newest_ms = 0

    @property
    def nouns(self) -> tuple[str, ...]:
        """The topics it reads: inputs and outputs of its stages."""
        return tuple(self._readers)

    @property
    def own_outputs(self) -> tuple[str, ...]:
        """The topics that gates wait for."""
        return tuple(self._owners)

    @property
    def held(self) -> dict[str, int]:
        """Topic noun → events held."""
        return {noun: ledger.held for noun, ledger in self._ledgers.items()}

    @property
    def oldest_ms(self) -> int | None:
        """Event time of the oldest held event."""
        return min((ms for ledger in self._ledgers.values() if (ms := ledger.oldest_ms) is not None), default=None)

    def watermarks(self) -> dict[str, int]:
        """Topic noun → offset to commit.

        All of them belong into ONE commit: an own output's offset is right only together with those of the inputs.
        """
        return {noun: mark for noun, ledger in self._ledgers.items() if (mark := ledger.watermark) is not None}

    def begin(self, positions: Mapping[str, int], ends: Mapping[str, int]) -> None:
        """The assignment's start.

        Args:
            positions: topic noun → offset that is read first.
            ends: own output noun → its end, asked for after the assignment.
        """
        for noun, owner in self._owners.items():
            owner.gate_end = ends[noun]
        for noun, position in positions.items():
            self.passed(noun, position, None)

    def feed(self, noun: str, messages: Sequence[Incoming]) -> None:
        """Give messages of one topic, in log order, to the stages that read it.

        Raises: StageError: too many dead letters. Whatever else a stage raises outside its contract passes through: the
            worker must not go on.
        """
        ledger, mask, readers, owner = (
            self._ledgers[noun],
            self._masks[noun],
            self._readers[noun],
            self._owners.get(noun),
        )
        self._stats.events[noun] += len(messages)
        for message in messages:
            time_ms = max(message.timestamp or 0, 0)
            if not ledger.see(message.offset, mask, time_ms) or not mask:
                continue
            self._newest_ms = max(self._newest_ms, time_ms)
            self._guard.record()
            event = self._decode(noun, message)
            if event is None:
                continue
            if owner is not None:
                self._read_back(owner, event, message.headers)
            for hosted in readers:
                try:
                    step = hosted.stage.apply(event)
                except (StageError, SchemaError) as error:
                    self._dead_letter(event, event.record, hosted.stage.name, error.reason, str(error), hosted.bit)
                else:
                    self._do(hosted, step)
            event.thin()
        self._settle()

    def passed(self, noun: str, position: int, caught_up_ms: int | None) -> None:
        """The reader stands at `position` of a topic, and everything before it was fed.

        Args: caught_up_ms: wall clock at which this was known to be the topic's end; None while behind.
        """
        self._ledgers[noun].advance(position)
        self._caught_up_ms[noun] = caught_up_ms
        owner = self._owners.get(noun)
        # Both, since some brokers tell too low an end (Tansu, for a batch of several records).
        if owner is not None and not owner.is_open and position >= owner.gate_end and caught_up_ms is not None:
            self._open(owner)
        self._settle()

    def tick(self) -> None:
        """Let time pass for every stage that has read all there is, with nothing on the way to it."""
        for hosted in self._hosted:
            caught = [self._caught_up_ms.get(noun) for noun in hosted.needs]
            known = [ms for ms in caught if ms is not None]
            if hosted.is_open and len(known) == len(caught) and all(stage.is_quiet for stage in hosted.upstream):
                self._do(hosted, hosted.stage.tick(max([self._newest_ms, min(known)])))
        self._settle()

    def work_done(self, running: Running, result: object) -> None:
        """Work has ended."""
        if not self.is_revoked:
            self._do(running.hosted, running.hosted.stage.work_done(running.work.key, result))
            self._settle()

    def revoke(self) -> None:
        """The partition is gone: drop everything, ignore what still comes back."""
        self.is_revoked = True
        self.outbox.clear()
        self.work.clear()

    def _decode(self, noun: str, message: Incoming) -> Event | None:
        """The event, or None once it is on its way to the dead letters.

        Its time is the record's own: the message's may be the broker's, which differs between two logs of the same records.
        """
        position = Position(noun, self.number, message.offset)
        value = message.value or b""
        sent = self._sent.pop(position, None)
        try:
            record = sent[1] if sent is not None and sent[0] == value else self._codec.decode(value)
        except SchemaError as error:
            time_ms = max(message.timestamp or 0, 0)
            event = Event(position, None, time_ms, value, message.key)  # type: ignore[arg-type]
            self._dead_letter(event, None, "decode", error.reason, str(error), self._masks[noun])
            return None
        return Event(position, record, event_time_ms(record), value, message.key, self._codec.decode)

    def _read_back(self, owner: Hosted, event: Event, headers: Iterable[tuple[str, bytes]]) -> None:
        try:
            used = read_used(headers)
            item = owner.stage.own_output(event)
        except (StageError, SchemaError) as error:
            self._dead_letter(event, event.record, owner.stage.name, error.reason, str(error), owner.bit)
            return
        if item is not None:
            kept = owner.kept_emits.pop(item, None)
            self._stats.dropped[owner.stage.name] += kept is not None
            self._finish(owner, item, () if kept is None else kept.used)
        self._release_after(event.position, used)

    def _do(self, hosted: Hosted, step: Step) -> None:
        self._stats.finished[hosted.stage.name] += len(step.finished)
        for position in step.finished:
            self._release(hosted, position)
        for emit in step.emits:
            if hosted.is_open:
                self._send(hosted, emit)
            else:
                hosted.kept_emits[emit.item] = emit
        for reject in step.rejects:
            if hosted.is_open:
                self._reject(hosted, reject)
            else:
                hosted.kept_rejects[reject.event.position] = reject
        for work in step.work:
            if hosted.is_open:
                self.work.append(Running(hosted, work))
            else:
                hosted.kept_work.append(work)

    def _open(self, hosted: Hosted) -> None:
        hosted.is_open = True
        kept = Step(
            tuple(hosted.kept_emits.values()), tuple(hosted.kept_rejects.values()), (), tuple(hosted.kept_work)
        )
        hosted.kept_emits, hosted.kept_rejects, hosted.kept_work = {}, {}, []
        self._do(hosted, kept)

    def _send(self, hosted: Hosted, emit: Emit) -> None:
        stage = hosted.stage
        if not emit.records:
            raise RuntimeError(
                f"stage {stage.name!r} emitted item {emit.item!r} without a record; an item is done once its output is in "
                "the log, so it needs one"
            )
        header = used_header(emit.used)
        left = [len(emit.records)]
        on_ack = partial(self._acked, hosted, emit, left)
        hosted.in_flight += 1
        for record in emit.records:
            message = to_message(record, self._codec, prefix=self._prefix, source=f"/{stage.name}", noun=stage.output)
            message = replace(message, headers=(*message.headers, header))
            self.outbox.append(Outgoing(message, self.number, record, on_ack))

    def _acked(self, hosted: Hosted, emit: Emit, left: list[int], sent: Outgoing, offset: int) -> None:
        if self.is_revoked:
            return
        noun = hosted.stage.output
        self._stats.emitted[hosted.stage.name] += 1
        if self._masks[noun] and offset >= (self._ledgers[noun].next_offset or 0) and len(self._sent) < _REMEMBERED:
            self._sent[Position(noun, self.number, offset)] = (sent.message.value, sent.record)
        left[0] -= 1
        if not left[0]:
            hosted.in_flight -= 1
            self._finish(hosted, emit.item, emit.used)
            self._settle()

    def _finish(self, hosted: Hosted, item: str, used: Iterable[Position]) -> None:
        for position in used:
            self._release(hosted, position)
        for position in hosted.stage.item_done(item):
            self._release(hosted, position)

    def _release(self, hosted: Hosted, position: Position) -> None:
        hosted.kept_rejects.pop(position, None)
        self._ledgers[position.noun].release(position.offset, hosted.bit)

    def _reject(self, hosted: Hosted, reject: Reject) -> None:
        self._dead_letter(
            reject.event, reject.event.record, reject.boundary, reject.reason, reject.message, hosted.bit
        )

    def _dead_letter(
        self, event: Event, record: Record | None, boundary: str, reason: str, error: str, holders: int
    ) -> None:
        topic = topics()[event.position.noun].name(self._prefix)
        letter = dead_letter(topic, event, record, boundary=boundary, error=error, reason=reason)
        message = to_message(letter, self._codec, prefix=self._prefix, source=f"/{boundary}")
        self.outbox.append(Outgoing(message, None, letter, partial(self._buried, event.position, holders)))
        self._stats.dead_letters[boundary, reason] += 1
        self._guard.dead_letter(reason, f"{topic} partition {self.number} offset {event.position.offset}: {error}")

    def _buried(self, position: Position, holders: int, _sent: Outgoing, _offset: int) -> None:
        if not self.is_revoked:
            self._ledgers[position.noun].release(position.offset, holders)
            self._settle()

    def _release_after(self, position: Position, used: Mapping[str, int]) -> None:
        """Let go of an own output once the watermarks of all its inputs have passed what it was made from."""
        for noun, offset in used.items():
            ledger = self._ledgers.get(noun)
            if ledger is not None and ((mark := ledger.watermark) is None or mark <= offset):
                heapq.heappush(self._waiting[noun], (offset, next(self._ticket), position, used))
                return
        self._ledgers[position.noun].release(position.offset, self._owners[position.noun].bit)

    def _settle(self) -> None:
        has_moved = True
        while has_moved:
            has_moved = False
            for noun, heap in self._waiting.items():
                mark = self._ledgers[noun].watermark if heap else None
                while heap and mark is not None and heap[0][0] < mark:
                    _, _, position, used = heapq.heappop(heap)
                    self._release_after(position, used)
                    has_moved = True
