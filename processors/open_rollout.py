"""A rollout while it is open: which of its records count, whether it is complete, and what it is as a `Rollout`.

The rules are join's, see `join.py`. Nothing here depends on the order across topics: records are kept by what they are
about, and within a topic they come in log order.

What is kept of a record is its bytes and a few numbers. It is read when it comes, to learn these, and decoded when the rollout
is closed. What a call or an event says (its mark) is a hash of everything in it: that is computed when the rollout is closed, or
when a second record comes about the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollstream.processors.base import Event, Position
from rollstream.processors.config import Signature
from rollstream.processors.content import about, mark, name_of, worse
from rollstream.processors.ledger import Marked, Refusal
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    ClosedBy,
    Delivery,
    EnvironmentEvent,
    ModelCall,
    Record,
    Rollout,
    RolloutOpened,
    RolloutStatus,
    Terminal,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json

Expected = tuple[int | None, int | None]
"""How many calls and events a terminal counts."""

_MARKED_LATER = (ModelCall, EnvironmentEvent)
"""The large ones."""


@dataclass(slots=True)
class Held(Marked):
    """An event that a rollout holds, and what must be known of it while it is encoded."""

    slot: int
    """What it is about."""
    kind: type[Record]
    """Class of its record."""
    call: int = 0
    """The call that was started or ended; 0 for other kinds."""
    expected: Expected = (None, None)
    """What a terminal counts."""


def hold(event: Event) -> Held:
    """What to keep of an event."""
    kind, fields = event.cls, event.fields
    said = None if kind in _MARKED_LATER else mark(event.record)
    held = Held(event, said, about(kind, fields, event.position.noun), kind)
    if kind in (CallStarted, ModelCall):
        held.call = hash(fields["call_id"])
    elif kind is Terminal:
        held.expected = fields["expected_calls"], fields["expected_events"]
    return held


class OpenRollout:
    """The records of a rollout attempt, from its opening until it is closed."""

    __slots__ = ("_calls", "_ends", "_num_events", "_repeated", "_slots", "is_superseded", "opened_ms")

    def __init__(self, opening: Held, opened_ms: int) -> None:
        """Args: opening: its opening; opened_ms: when that was."""
        self.opened_ms = opened_ms
        """Event time of the opening."""
        self.is_superseded = False
        """Whether a higher attempt was opened before this one's end."""
        self._slots: dict[int, Held] = {opening.slot: opening}
        self._repeated: dict[int, list[Held]] = {}
        self._ends: dict[str, Expected] = {}
        self._calls: set[int] = set()
        self._num_events = 0

    def add(self, held: Held) -> str:
        """Returns: `kept`, `duplicate` or `late`."""
        noun = held.event.position.noun
        first = self._slots.get(held.slot)
        repeated = self._repeated.get(held.slot, ())
        if first is not None:
            said = held.marked(mark)
            if said == first.marked(mark) or any(said == one.marked(mark) for one in repeated):
                return "duplicate"
        if noun in self._ends and not self._is_short_of(noun):
            return "late"
        if first is not None:
            self._repeated.setdefault(held.slot, []).append(held)
            return "kept"
        self._slots[held.slot] = held
        if held.kind is EnvironmentEvent:
            self._num_events += 1
        elif held.kind is Terminal:
            self._ends[noun] = held.expected
        elif held.kind in (CallStarted, ModelCall):
            self._calls.add(held.call)
        return "kept"

    def has_ended_in(self, noun: str) -> bool:
        """Whether its terminal is in, of this topic."""
        return noun in self._ends

    def is_complete(self) -> bool:
        """Whether all terminals are in, and with them whatever they count."""
        return len(self._ends) == len(TERMINAL_TOPICS) and self._counts_are_right()

    def held(self) -> Iterator[Held]:
        """All events held."""
        yield from self._slots.values()
        for repeated in self._repeated.values():
            yield from repeated

    def conflicts(self, item: str) -> dict[Position, Refusal]:
        """Events that contradict each other, and what to say about them."""
        found: dict[Position, Refusal] = {}
        for slot, repeated in self._repeated.items():
            first = self._slots[slot]
            refusal = (
                "conflict",
                f"rollout {item!r} has two records about {name_of(first.event.record)} with different content; two "
                "writers share an id",
            )
            both = [first, *repeated] if first.kind in (ModelCall, EnvironmentEvent) else repeated
            found.update({one.event.position: refusal for one in both})
        ends = self._terminals()
        found.update(
            {
                end.event.position: (
                    "conflict",
                    f"rollout {item!r} was finished twice, differently; the last one counts",
                )
                for end in ends
                if end.marked(mark) != ends[-1].marked(mark)
            }
        )
        return found

    def to_record(self, deadline_ms: int, signature: Signature, refused: Mapping[Position, Refusal]) -> Rollout:
        """The rollout as it stands, without what is refused. Decodes every event that may be part of it."""
        ends = self._terminals()
        terminal: Any = ends[-1].event.record if ends else None
        in_time = len(ends) == len(TERMINAL_TOPICS) and terminal.finished_at_ms <= deadline_ms
        is_barrier = in_time and self._counts_are_right()
        opened: Any = next(h.event.record for h in self._slots.values() if h.kind is RolloutOpened)
        kept = [
            _record(held)
            for held in self._slots.values()
            if held.kind not in (RolloutOpened, Terminal)
            and held.event.position not in refused
            and (is_barrier or held.event.time_ms <= deadline_ms)
        ]
        calls, lost = _calls(kept)
        versions = [span.version for call in calls for span in call.version_spans]
        if self.is_superseded or (in_time and not is_barrier):
            status = RolloutStatus.ABORTED
        else:
            status = terminal.status if is_barrier else RolloutStatus.TIMED_OUT
        return with_digest(
            Rollout(
                rollout_id=opened.rollout_id,
                attempt=opened.attempt,
                group_id=opened.group_id,
                group_size=opened.group_size,
                task_id=opened.task_id,
                task=opened.task,
                policy=opened.policy,
                status=status,
                outcome=terminal.outcome if in_time else Json("{}"),
                closed_by=ClosedBy.BARRIER if is_barrier else ClosedBy.DEADLINE,
                calls=calls,
                lost_call_ids=lost,
                events=tuple(record for record in kept if isinstance(record, EnvironmentEvent)),
                opened_at_ms=opened.opened_at_ms,
                closed_at_ms=terminal.finished_at_ms if is_barrier else deadline_ms,
                digest="",
                stage=signature.stage,
                pipeline=signature.pipeline,
                pipeline_digest=signature.pipeline_digest,
                version_min=min(versions, default=None),
                version_max=max(versions, default=None),
            )
        )

    def _terminals(self) -> list[Held]:
        """The terminals, the one that counts last: that in `terminals`, since `finish` writes there last."""
        ends = [held for held in self._slots.values() if held.kind is Terminal]
        return sorted(ends, key=lambda held: TERMINAL_TOPICS.index(held.event.position.noun))

    def _counts_are_right(self) -> bool:
        """By the terminal that counts."""
        noun = next((noun for noun in reversed(TERMINAL_TOPICS) if noun in self._ends), None)
        if noun is None:
            return False
        calls, events = self._ends[noun]
        return calls in (None, len(self._calls)) and events in (None, self._num_events)

    def _is_short_of(self, noun: str) -> bool:
        """Whether a topic's own terminal counts more records of that topic than are in."""
        calls, events = self._ends[noun]
        expected, found = {"calls": (calls, len(self._calls)), "environment": (events, self._num_events)}.get(
            noun, (None, 0)
        )
        return expected is not None and expected > found


def _record(held: Held) -> Record:
    """The record, which gives the mark on the way."""
    record = held.event.record
    if held.mark is None:
        held.mark = mark(record)
    return record


def _calls(records: Sequence[Record]) -> tuple[tuple[ModelCall, ...], tuple[str, ...]]:
    """Calls with their true delivery, in order; and the calls whose last started attempt has no outcome."""
    delivered: dict[tuple[str, int], Delivery] = {}
    started: dict[str, int] = {}
    ended: dict[str, int] = {}
    calls: list[ModelCall] = []
    for record in records:
        if isinstance(record, CallDelivery):
            key = (record.call_id, record.call_attempt)
            delivered[key] = worse(delivered.get(key, Delivery.UNKNOWN), record.delivered)
        elif isinstance(record, CallStarted):
            started[record.call_id] = max(started.get(record.call_id, 0), record.call_attempt)
        elif isinstance(record, ModelCall):
            ended[record.call_id] = max(ended.get(record.call_id, 0), record.call_attempt)
            calls.append(record)
    for at, call in enumerate(calls if delivered else ()):
        correction = delivered.get((call.call_id, call.call_attempt))
        if correction is not None:
            calls[at] = replace(call, delivered=worse(call.delivered, correction))
    calls.sort(key=lambda call: (call.call_index, call.call_id, call.call_attempt))
    lost = sorted(call_id for call_id, attempt in started.items() if ended.get(call_id, -1) < attempt)
    return tuple(calls), tuple(lost)
