"""A rollout while it is open: which of its records count, whether it is complete, and what it is as a `Rollout`.

The rules are join's, see `join.py`. Nothing here depends on the order across topics: records are kept by what they are
about, and within a topic they come in log order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from rollstream.processors.base import Event, Position
from rollstream.processors.config import Signature
from rollstream.processors.content import mark, worse
from rollstream.processors.ledger import Refusal
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    ClosedBy,
    Delivery,
    EnvironmentEvent,
    ModelCall,
    Rollout,
    RolloutOpened,
    RolloutStatus,
    Terminal,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json

Slot = tuple[str, ...] | tuple[str, str, int]
"""What a record is about; two records about the same thing are a repetition or a conflict."""


class OpenRollout:
    """The records of a rollout attempt, until it is closed."""

    __slots__ = ("call_ids", "is_superseded", "num_events", "repeated", "slots", "started_ms")

    def __init__(self) -> None:
        self.slots: dict[Slot, Event] = {}
        self.repeated: list[tuple[Slot, Event]] = []
        """Records about the same thing as one in `slots`, with other content."""
        self.started_ms = 1 << 62
        """When it was opened, else the time of its earliest record."""
        self.call_ids: set[str] = set()
        """Calls that were started or ended."""
        self.num_events = 0
        """Distinct environment events."""
        self.is_superseded = False

    def add(self, event: Event) -> str:
        """Returns: `kept`, `duplicate` or `late`."""
        record = event.record
        slot = _slot(event)
        held = self.slots.get(slot)
        if held is not None and mark(held.record) == mark(record):
            return "duplicate"
        barrier = self.slots.get(("terminal", event.position.noun))
        if barrier is not None and not self._is_short_of(event.position.noun, barrier.record):
            return "late"
        if held is not None:
            self.repeated.append((slot, event))
            return "kept"
        self.slots[slot] = event
        if isinstance(record, RolloutOpened):
            self.started_ms = record.opened_at_ms
        elif ("opened",) not in self.slots:
            self.started_ms = min(self.started_ms, event.time_ms)
        if isinstance(record, EnvironmentEvent):
            self.num_events += 1
        elif isinstance(record, CallStarted | ModelCall):
            self.call_ids.add(record.call_id)
        return "kept"

    def is_complete(self) -> bool:
        """Whether all terminals are in, and with them whatever they count."""
        slots = self.slots
        return (
            ("terminal", "terminals") in slots
            and ("terminal", "calls") in slots
            and ("terminal", "environment") in slots
            and self._counts_are_right()
        )

    def events(self) -> Iterator[Event]:
        """All events held."""
        yield from self.slots.values()
        for _, event in self.repeated:
            yield event

    def conflicts(self, item: str) -> dict[Position, Refusal]:
        """Events that contradict each other, and what to say about them."""
        found: dict[Position, Refusal] = {}
        for slot, event in self.repeated:
            both = (event, self.slots[slot]) if slot[0] in ("call", "event") else (event,)
            for one in both:
                found[one.position] = (
                    "conflict",
                    f"rollout {item!r} has two records about {'/'.join(str(part) for part in slot)!r} with different "
                    "content; two writers share an id",
                )
        return found

    def to_record(
        self, deadline_ms: int, signature: Signature, refused: Mapping[Position, Refusal]
    ) -> Rollout | None:
        """The rollout as it stands, without what is refused. Returns: None if it has neither opening nor terminal."""
        terminal = self._terminal()
        has_all = all(("terminal", noun) in self.slots for noun in TERMINAL_TOPICS)
        in_time = has_all and terminal is not None and terminal.finished_at_ms <= deadline_ms
        is_barrier = in_time and self._counts_are_right()
        opening = self.slots.get(("opened",))
        opened = opening.record if opening else None
        if not isinstance(opened, RolloutOpened):
            opened = None
        source = opened or terminal
        if source is None:
            return None
        kept = [
            (slot, event)
            for slot, event in self.slots.items()
            if event.position not in refused and (is_barrier or event.time_ms <= deadline_ms)
        ]
        calls, lost = _calls(kept)
        versions = [span.version for call in calls for span in call.version_spans]
        if self.is_superseded or (in_time and not is_barrier):
            status = RolloutStatus.ABORTED
        elif is_barrier and terminal is not None:
            status = terminal.status
        else:
            status = RolloutStatus.TIMED_OUT
        return with_digest(
            Rollout(
                rollout_id=source.rollout_id,
                attempt=source.attempt,
                group_id=source.group_id,
                group_size=source.group_size,
                task_id=source.task_id,
                task=opened.task if opened else Json("{}"),
                policy=opened.policy if opened else (calls[0].policy if calls else "default"),
                status=status,
                outcome=terminal.outcome if in_time and terminal is not None else Json("{}"),
                closed_by=ClosedBy.BARRIER if is_barrier else ClosedBy.DEADLINE,
                calls=calls,
                lost_call_ids=lost,
                events=tuple(event.record for _, event in kept if isinstance(event.record, EnvironmentEvent)),
                opened_at_ms=self.started_ms,
                closed_at_ms=terminal.finished_at_ms if is_barrier and terminal is not None else deadline_ms,
                digest="",
                stage=signature.stage,
                pipeline=signature.pipeline,
                pipeline_digest=signature.pipeline_digest,
                version_min=min(versions, default=None),
                version_max=max(versions, default=None),
            )
        )

    def _terminal(self) -> Terminal | None:
        """Of several different ones, that in `terminals` counts, since `finish` writes there last."""
        for noun in reversed(TERMINAL_TOPICS):
            event = self.slots.get(("terminal", noun))
            if event is not None and isinstance(event.record, Terminal):
                return event.record
        return None

    def _counts_are_right(self) -> bool:
        terminal = self._terminal()
        return terminal is not None and (
            terminal.expected_calls in (None, len(self.call_ids))
            and terminal.expected_events in (None, self.num_events)
        )

    def _is_short_of(self, noun: str, terminal: object) -> bool:
        """Whether a topic's own terminal counts more records of that topic than are in."""
        if not isinstance(terminal, Terminal):
            return False
        expected, found = {
            "calls": (terminal.expected_calls, len(self.call_ids)),
            "environment": (terminal.expected_events, self.num_events),
        }.get(noun, (None, 0))
        return expected is not None and expected > found


def _slot(event: Event) -> Slot:
    return _SLOTS[type(event.record)](event.record, event)


_SLOTS: dict[type, Callable[..., Slot]] = {
    RolloutOpened: lambda r, e: ("opened",),
    CallStarted: lambda r, e: ("started", r.call_id, r.call_attempt),
    ModelCall: lambda r, e: ("call", r.call_id, r.call_attempt),
    CallDelivery: lambda r, e: ("delivery", r.call_id, r.call_attempt, r.delivered),
    EnvironmentEvent: lambda r, e: ("event", r.event_id),
    Terminal: lambda r, e: ("terminal", e.position.noun),
}


def _calls(kept: list[tuple[Slot, Event]]) -> tuple[tuple[ModelCall, ...], tuple[str, ...]]:
    """Calls with their true delivery, in order; and the calls whose last started attempt has no outcome."""
    delivered: dict[tuple[str, int], Delivery] = {}
    started: dict[str, int] = {}
    ended: dict[str, int] = {}
    calls: list[ModelCall] = []
    for _, event in kept:
        record = event.record
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
