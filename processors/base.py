"""What a stage is, and what the shell does for it.

A stage is a pure state machine for ONE partition of the topics it reads. The shell (one file, knows Kafka) feeds it
decoded records in log order and does what it asks for. No stage sends, commits, sleeps or reads a clock.

The life of an input event: the shell counts it as *held* by every stage that reads its topic. A stage lets go of it by
returning it in `Step.finished`, or by tying it to an item (`Emit.used`). An item is what a stage makes one output for: a
rollout in join, a group in the others. The item is finished when the broker has acknowledged its output, or when the stage's own
output is read back and says so; the shell then calls `item_done`, which returns the positions to let go of.
Offsets are committed in order, up to the first event that somebody still holds.

Stages whose state spans events read their own output topic back (`reads_own_output`). Until that topic has been read to the
end it had at assignment, the shell keeps what the stage wants to emit, and drops it if the item turns out to be done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from rollstream.schemas.parsed import Fields, Parsed, class_of, fields_of
from rollstream.schemas.records import Record


class Position(NamedTuple):
    """Where an event stands."""

    noun: str
    """Topic noun, for instance `calls`."""
    partition: int
    """Partition."""
    offset: int
    """Offset."""


class Event:
    """A record read from a topic. What a stage keeps of it is its bytes: the record is decoded again when it is asked for.

    The shell calls `thin` once every stage has seen the event. From then on each access to `record` decodes, so that a stage
    with many open items holds their encoded bytes once, and reads `record` once when it closes one. Until then a stage that
    only wants to know what the event is about asks for its `cls` and `fields`, for which no record has to be made.
    """

    __slots__ = ("_decode", "_record", "key", "position", "time_ms", "value")

    def __init__(
        self,
        position: Position,
        record: Record | Parsed,
        time_ms: int,
        value: bytes,
        key: bytes | None = None,
        decode: Callable[[bytes], Record] | None = None,
    ) -> None:
        """Args: decode: makes the record of `value` again; None keeps the record."""
        self.position = position
        """Where it stands."""
        self.time_ms = time_ms
        """Its event time."""
        self.value = value
        """Its bytes as they stand in the log."""
        self.key = key
        """Its key."""
        self._record: Record | Parsed | None = record
        self._decode = decode

    @property
    def record(self) -> Record:
        """The decoded record."""
        found = self._record
        if found is None and self._decode is not None:
            return self._decode(self.value)
        if isinstance(found, Parsed):
            found = self._record = cast(Record, found.make())
        return cast(Record, found)

    @property
    def fields(self) -> Fields:
        """The record's fields."""
        return fields_of(self._record or self.record)

    @property
    def cls(self) -> type[Record]:
        """The record's class."""
        return class_of(self._record or self.record)

    def thin(self) -> None:
        """Let go of the decoded record."""
        if self._decode is not None:
            self._record = None

    def __repr__(self) -> str:
        return f"Event({self.position}, {len(self.value)} bytes)"


@dataclass(frozen=True, slots=True)
class Emit:
    """Write these records, in order, to the stage's output topic; the item is finished when the last is acknowledged."""

    item: str
    """Identity of the item, unique within the stage: `rollout_id/attempt`, or `group_id/revision`."""
    records: tuple[Record, ...]
    """What to write."""
    used: tuple[Position, ...]
    """All events that the records were made from; held until the item is done."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Put an event into the dead-letter topic; it is finished when that is acknowledged."""

    event: Event
    """The event."""
    boundary: str
    """Where it failed: the stage's name."""
    reason: str
    """Reason code."""
    message: str
    """What failed, what was expected, what to do."""


@dataclass(frozen=True, slots=True)
class Work:
    """Run something slow (a scorer) outside the stage; its result comes back through `work_done`."""

    key: str
    """Identity of the work."""
    run: Callable[[], Awaitable[object]]
    """What to run; it never raises: an error is a result."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the shell shall do after a stage has seen something."""

    emits: tuple[Emit, ...] = ()
    """Records to write."""
    rejects: tuple[Reject, ...] = ()
    """Events for the dead-letter topic."""
    finished: tuple[Position, ...] = ()
    """Events that nothing will be made from: duplicates, and what belongs to items already done."""
    work: tuple[Work, ...] = ()
    """Slow work to start."""


NOTHING = Step()
"""The event is kept; nothing to do."""


class Stage(Protocol):
    """A pure state machine for one partition."""

    name: str
    """Stage name, as in the pipeline file."""
    inputs: tuple[str, ...]
    """Topic nouns read, its own output not among them."""
    output: str
    """Topic noun written."""
    reads_own_output: bool
    """True where state spans events."""
    remembers_ms: int
    """How much younger than one of its outputs everything unfinished must be before the shell stops reading that output back
    at a start, and calls `forget`. 0: as soon as what it was made of is committed."""

    @property
    def pending_ms(self) -> int | None:
        """Event time from which on more may come of what it has seen, without a further event: work that runs or waits for its
        turn, what a tick has left to the next. Downstream of it no later time passes. None: nothing.
        """

    def apply(self, event: Event) -> Step:
        """See one input event, in log order per topic."""

    def tick(self, now_ms: int) -> Step:
        """See time pass. The shell calls this only while the partition is read to its end.

        Args: now_ms: event time: the newest record's time, or the wall clock while all inputs are read to their end.
        """

    def own_output(self, event: Event) -> str | None:
        """Which item an event of the stage's own output topic finishes; None if it finishes none (a sample)."""

    def item_done(self, item: str) -> tuple[Position, ...]:
        """The item is finished: forget it, remember that it is done, and say which held events that lets go of.

        Of what it was emitted from (`Emit.used`), that is all that is part of what the log holds, which may be another worker's:
        the shell lets go of nothing else, and the rest has to be rejected first.
        """

    def work_done(self, key: str, result: object) -> Step:
        """The result of `Work`."""

    def forget(self, item: str) -> None:
        """The item's output will not be read back any more: nothing that is open or unread is as old as it."""
