"""Everything of one partition number: its stages, who holds which event, what waits to be sent.

Pure but for the callbacks it is given: records come in through `feed`, messages and work go out through `outbox` and
`work`, acknowledgements come back through `Outgoing.on_ack`. After `revoke` every late callback is ignored, so an object of
this class is one epoch of its partition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from rollstream.errors import SchemaError, StageError
from rollstream.processors.base import Emit, Event, Position, Reject, Stage, Step
from rollstream.processors.shell.admission import Admission
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.hosted import Hosted, Running, host
from rollstream.processors.shell.ledger import Ledger
from rollstream.processors.shell.messages import Incoming, Outgoing, dead_letter, read_used, used_header
from rollstream.processors.shell.release import OwnOutput, Releases
from rollstream.processors.shell.stats import Stats
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import draft_message, event_time_ms
from rollstream.schemas.records import Record
from rollstream.schemas.records.claims import ClaimCheck
from rollstream.schemas.topics import topics

_SENT_BYTES = 8_000_000  # own records kept between acknowledgement and read-back; further ones are decoded again


class Mark(NamedTuple):
    """How far a topic partition is done."""

    offset: int
    """What to commit: a restart reads from here."""
    finished: int
    """Below this, what a restart reads again is for a stage's memory alone; never less than `offset`."""


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
        admission: Admission | None = None,
    ) -> None:
        """Args: stages: fresh ones, in pipeline order; prefix: of topic names; admission: None takes every record."""
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
        self._admission = admission or Admission()
        self._decode_again = codec.decode_again
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
        self._releases = Releases(self._ledgers)
        self._buried: deque[tuple[Position, int]] = deque()
        self._sent: dict[Position, tuple[bytes, Record]] = {}
        self._sent_bytes = 0
        self._past: Mapping[str, int] = {}
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
    def closed_gates(self) -> tuple[str, ...]:
        """The own outputs that are not read yet to the end they had at assignment."""
        return tuple(noun for noun, owner in self._owners.items() if not owner.is_open)

    @property
    def held(self) -> dict[str, int]:
        """Topic noun → events held."""
        return {noun: ledger.held for noun, ledger in self._ledgers.items()}

    @property
    def oldest_ms(self) -> int | None:
        """Append time of the oldest held event."""
        return min((ms for ledger in self._ledgers.values() if (ms := ledger.oldest_ms) is not None), default=None)

    def marks(self) -> dict[str, Mark]:
        """Topic noun → how far it is done.

        All of them belong into ONE commit: an own output's offset is right only together with those of the inputs.
        """
        found: dict[str, Mark] = {}
        for noun, ledger in self._ledgers.items():
            if (mark := ledger.watermark) is not None:
                remembered = self._releases.first_remembered(noun)
                # Not further than was read, also where more was finished before: the memory is whole only then.
                offset = mark if remembered is None else min(mark, remembered)
                found[noun] = Mark(offset, max(mark, self._past.get(noun, 0)))
        return found

    def watermarks(self) -> dict[str, int]:
        """Topic noun → offset to commit."""
        return {noun: mark.offset for noun, mark in self.marks().items()}

    def begin(
        self, positions: Mapping[str, int], ends: Mapping[str, int], finished: Mapping[str, int] | None = None
    ) -> None:
        """The assignment's start.

        Args:
            positions: topic noun → offset that is read first.
            ends: own output noun → its end, asked for after the assignment.
            finished: own output noun → `Mark.finished` as it was committed.
        """
        self._past = dict(finished or {})
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
        past = self._past.get(noun, 0)
        for message in messages:
            time_ms = max(message.timestamp or 0, 0)
            is_past = message.offset < past
            if not ledger.see(message.offset, 0 if is_past else mask, time_ms) or not mask:
                continue
            if is_past:
                if owner is not None:
                    self._recall(owner, message, time_ms)
                continue
            self._newest_ms = max(self._newest_ms, time_ms)
            self._guard.record()
            event = self._decode(noun, message)
            if event is None:
                continue
            if owner is not None:
                self._read_back(owner, event, message.headers, time_ms)
            for hosted in readers:
                try:
                    step = hosted.stage.apply(event)
                except (StageError, SchemaError) as error:
                    self._dead_letter(
                        event, _record_of(event), hosted.stage.name, error.reason, str(error), hosted.bit
                    )
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
        """Let time pass for every stage that has read all there is, up to what is still on the way to it."""
        for hosted in self._hosted:
            caught = [self._caught_up_ms.get(noun) for noun in hosted.needs]
            known = [ms for ms in caught if ms is not None]
            if not hosted.is_open or len(known) < len(caught):
                continue
            settled = [ms for stage in hosted.upstream if (ms := stage.settled_ms) is not None]
            if now_ms := min([max([self._newest_ms, min(known)]), *settled]):
                self._do(hosted, hosted.stage.tick(now_ms))
                hosted.heard_ms = now_ms  # not before: what the tick made is not settled at this time
        if all(self._caught_up_ms.get(noun) is not None for noun in self._readers):
            self._let_go_of_buried()  # there is nothing that a bad deploy could drain
        self._releases.tick(self._caught_up_ms)
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
        if sent is not None:
            self._sent_bytes -= len(sent[0])
        try:
            record = sent[1] if sent is not None and sent[0] == value else self._codec.parse(value)
            self._admission.check(position, record)
        except SchemaError as error:
            time_ms = max(message.timestamp or 0, 0)
            event = Event(position, None, time_ms, value, message.key)  # type: ignore[arg-type]
            self._dead_letter(
                event, self._codec.claim_check(value), "decode", error.reason, str(error), self._masks[noun]
            )
            return None
        return Event(position, record, event_time_ms(record), value, message.key, self._decode_again)

    def _read_back(self, owner: Hosted, event: Event, headers: Iterable[tuple[str, bytes]], appended_ms: int) -> None:
        try:
            used = read_used(headers)
            item = owner.stage.own_output(event)
        except (StageError, SchemaError) as error:
            self._dead_letter(event, _record_of(event), owner.stage.name, error.reason, str(error), owner.bit)
            return
        if item is not None:
            kept = owner.kept_emits.pop(item, None)
            self._stats.dropped[owner.stage.name] += kept is not None
            self._finish(owner, item)
        self._releases.add(OwnOutput(owner, event.position.offset, item, appended_ms), used)

    def _recall(self, owner: Hosted, message: Incoming, appended_ms: int) -> None:
        """An own output that is read again for the stage's memory alone. What cannot be used was buried long ago."""
        value = message.value or b""
        position = Position(owner.stage.output, self.number, message.offset)
        try:
            record = self._codec.parse(value)
            item = owner.stage.own_output(Event(position, record, event_time_ms(record), value, message.key))
        except (StageError, SchemaError):
            return
        if item is not None:
            self._finish(owner, item)
            self._releases.remember(OwnOutput(owner, message.offset, item, appended_ms))

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
        on_ack = partial(self._acked, hosted, emit, left, hosted.send())
        for record in emit.records:
            message = draft_message(
                record, self._codec, prefix=self._prefix, source=f"/{stage.name}", noun=stage.output
            )
            message = replace(message, headers=(*message.headers, header))
            self.outbox.append(Outgoing(message, self.number, record, on_ack))

    def _acked(self, hosted: Hosted, emit: Emit, left: list[int], since_ms: int, sent: Outgoing, offset: int) -> None:
        if self.is_revoked:
            return
        noun = hosted.stage.output
        self._stats.emitted[hosted.stage.name] += 1
        value = sent.message.value
        is_unread = self._masks[noun] and offset >= (self._ledgers[noun].next_offset or 0)
        if is_unread and self._sent_bytes + len(value) <= _SENT_BYTES:
            self._sent[Position(noun, self.number, offset)] = (value, sent.record)
            self._sent_bytes += len(value)
        left[0] -= 1
        if not left[0]:
            hosted.sent(since_ms)
            self._finish(hosted, emit.item)
            self._settle()

    def _finish(self, hosted: Hosted, item: str) -> None:
        """Let go of what the stage lets go of, and of nothing that it emitted the item from: the log may hold another one."""
        for position in hosted.stage.item_done(item):
            self._release(hosted, position)

    def _release(self, hosted: Hosted, position: Position) -> None:
        hosted.kept_rejects.pop(position, None)
        self._ledgers[position.noun].release(position.offset, hosted.bit)

    def _reject(self, hosted: Hosted, reject: Reject) -> None:
        self._dead_letter(
            reject.event, _record_of(reject.event), reject.boundary, reject.reason, reject.message, hosted.bit
        )

    def _dead_letter(
        self, event: Event, record: Record | ClaimCheck | None, boundary: str, reason: str, error: str, holders: int
    ) -> None:
        topic = topics()[event.position.noun].name(self._prefix)
        letter = dead_letter(topic, event, record, boundary=boundary, error=error, reason=reason)
        message = draft_message(letter, self._codec, prefix=self._prefix, source=f"/{boundary}")
        # Under bits of its own: whatever the stage says of the event meanwhile, it stays until the dead letter is written.
        buried = holders << len(self._hosted)
        self._ledgers[event.position.noun].hold(event.position.offset, buried)
        self.outbox.append(Outgoing(message, None, letter, partial(self._bury, event.position, holders | buried)))
        self._stats.dead_letters[boundary, reason] += 1
        self._guard.dead_letter(reason, f"{topic} partition {self.number} offset {event.position.offset}: {error}")

    def _bury(self, position: Position, holders: int, _sent: Outgoing, _offset: int) -> None:
        if not self.is_revoked:
            self._buried.append((position, holders))
            self._settle()

    def _let_go_of_buried(self) -> None:
        while self._buried:
            position, holders = self._buried.popleft()
            self._ledgers[position.noun].release(position.offset, holders)

    def _settle(self) -> None:
        if self._buried and self._guard.has_judged:
            self._let_go_of_buried()
        self._releases.settle()


def _record_of(event: Event) -> Record | None:
    """The record, for what a dead letter tells of it; None if its bytes cannot be decoded any more."""
    try:
        return event.record
    except SchemaError:
        return None
