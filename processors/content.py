"""What the records of a rollout are about and what they say, as numbers that tell repetition from news.

`about` is a hash of what a record is about: two records about one thing are a repetition or a conflict. `mark` is a hash of
a record's content, `marks_of` the marks of everything a written rollout was made of: every record that
join put into it has its mark there. Hashes are Python's: good within one process, where both are computed.

Left out on purpose: the times of openings, events and terminals (a client that repeats the request repeats the fact),
`ModelCall.delivered` (join overwrites it), and of an intent everything but the call (the outcome holds the rest).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from rollstream.schemas.parsed import Fields
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

_OPENED = attrgetter("group_id", "group_size", "task_id", "task", "policy")
_CALL = attrgetter(*(field.name for field in fields(ModelCall) if field.name != "delivered"))
_EVENT = attrgetter(*(field.name for field in fields(EnvironmentEvent) if field.name not in ("at_ms", "reward")))
_WORST_FIRST = (Delivery.NONE, Delivery.PARTIAL, Delivery.FULL, Delivery.UNKNOWN)


def about(kind: type[Record], fields: Fields, noun: str) -> int:
    """What a source record of a topic is about."""
    return hash(_ABOUT[kind](fields, noun))


def mark(record: Record) -> int:
    """What a source record says."""
    return _MARKS[type(record)](record)


def marks_of(rollout: Rollout) -> list[int]:
    """The marks of every record that the rollout was made of, or might have been without being another one."""
    marks = [hash(("opened", *_OPENED(rollout)))]
    for call in rollout.calls:
        marks.append(mark(call))
        marks.append(started_mark(call.call_id))
        marks.extend(
            _delivery_mark(call.call_id, call.call_attempt, level)
            for level in _WORST_FIRST
            if worse(call.delivered, level) is call.delivered
        )
    marks.extend(started_mark(call_id) for call_id in rollout.lost_call_ids)
    marks.extend(mark(event) for event in rollout.events)
    if rollout.status is RolloutStatus.ABORTED:  # the terminal may have said something else, see join
        marks.extend(_terminal_mark(status, rollout.outcome) for status in RolloutStatus)
    elif rollout.closed_by is ClosedBy.BARRIER:
        marks.append(_terminal_mark(rollout.status, rollout.outcome))
    return marks


def started_mark(call_id: str) -> int:
    """The mark of a call's intent: present for every call that the rollout knows, lost ones included."""
    return hash(("started", call_id))


def name_of(record: Record) -> str:
    """What a record is about, for people."""
    if isinstance(record, CallStarted | ModelCall | CallDelivery):
        return f"call {record.call_id!r} attempt {record.call_attempt}"
    return f"event {record.event_id!r}" if isinstance(record, EnvironmentEvent) else f"its {type(record).__name__}"


def worse(one: Delivery, other: Delivery) -> Delivery:
    """The lesser of two deliveries; `unknown` says nothing."""
    return min(one, other, key=_WORST_FIRST.index)


def _delivery_mark(call_id: str, call_attempt: int, delivered: Delivery) -> int:
    return hash(("delivery", call_id, call_attempt, delivered))


def _terminal_mark(status: RolloutStatus, outcome: str) -> int:
    return hash(("terminal", status, outcome))


_ABOUT: dict[type, Callable[[Fields, str], tuple[object, ...]]] = {
    RolloutOpened: lambda r, noun: ("opened",),
    CallStarted: lambda r, noun: ("started", r["call_id"], r["call_attempt"]),
    ModelCall: lambda r, noun: ("call", r["call_id"], r["call_attempt"]),
    CallDelivery: lambda r, noun: ("delivery", r["call_id"], r["call_attempt"], r["delivered"]),
    EnvironmentEvent: lambda r, noun: ("event", r["event_id"]),
    Terminal: lambda r, noun: ("terminal", noun),
}

_MARKS: dict[type, Callable[[Any], int]] = {
    RolloutOpened: lambda r: hash(("opened", *_OPENED(r))),
    CallStarted: lambda r: started_mark(r.call_id),
    ModelCall: lambda r: hash(_CALL(r)),
    CallDelivery: lambda r: _delivery_mark(r.call_id, r.call_attempt, r.delivered),
    EnvironmentEvent: lambda r: hash((_EVENT(r), repr(r.reward))),  # repr: a NaN equals itself
    Terminal: lambda r: _terminal_mark(r.status, r.outcome),
}
