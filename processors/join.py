"""Join: the records of a rollout, from three topics, become one `Rollout`.

A rollout begins with its opening, which the gateway has acknowledged in `calls` before anybody can write anything else of it.
It is complete when its terminal has been read in `calls`, `environment` and `terminals`. Within a topic, order is the log's;
across topics there is none, and the rollout does not depend on it:

* What is read before the opening waits for it. If everything is read to its end and the opening is still not there, the event
  goes to the dead letters (`no_opening`): its rollout is long done and forgotten, or its opening is lost. So a rollout is never
  built again from what comes late. A repeated opening of a forgotten rollout does open it again: it ends as `timed_out`, and
  the group, which remembers longer, refuses it as late.
* A record behind its own topic's terminal is late, whether or not the other terminals are in; except that as long as fewer
  are in than the terminal's `expected_*` counts, it is taken. If the counts still differ at the deadline, the rollout is written
  as `aborted`: what came is accounted for and nothing is trained on.
* A repeated record with the same content is dropped. The same call or event id with other content sends both to the
  dead letters (`conflict`); of openings and intents, which a client may repeat, the first counts, and of different
  terminals that in `terminals`.
* A rollout that is not complete `deadline_s` after its opening is closed as `timed_out`. What happened later than that is
  late even if it was read before, so that a rebuild from the log decides the same.
* Attempts are rollouts of their own, `rollout_id/attempt`. If a higher attempt is opened before the lower one's terminal
  (in the log of `calls`), the lower one ends as `aborted`, whatever its terminal says.
* A call whose prompt builds on a call that is not there is kept: build masks it.

Late is never dropped: it goes to the dead letters with its bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rollstream.errors import StageError
from rollstream.processors.base import NOTHING, Emit, Event, Position, Reject, Step
from rollstream.processors.config import JoinConfig, Signature
from rollstream.processors.content import mark, marks_of, started_mark
from rollstream.processors.ledger import KEPT_ITEMS, Ledger, Refusal
from rollstream.processors.open_rollout import Held, OpenRollout, hold
from rollstream.processors.orphans import Orphans
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    EnvironmentEvent,
    ModelCall,
    Rollout,
    RolloutOpened,
    Terminal,
)
from rollstream.schemas.topics import TERMINAL_TOPICS

_NAMES_ITS_ITEM = (RolloutOpened, CallStarted, ModelCall, CallDelivery, EnvironmentEvent, Terminal)

CLOSED_AT_ONCE_BYTES = 64 << 20
"""How much a tick closes before it leaves the rest to the next, a second later: an outage lets all rollouts expire in one minute,
and what leaves is in memory twice."""


class JoinStage:
    """Join, for one partition."""

    name = "join"
    inputs: tuple[str, ...] = TERMINAL_TOPICS
    output = "rollouts"
    reads_own_output = True
    remembers_ms = 0
    kept_items = KEPT_ITEMS
    """How many done rollouts are remembered of those that no restart would read again; a late event of one is `late`."""

    def __init__(self, config: JoinConfig, signature: Signature) -> None:
        self._deadline_ms = round(config.deadline_s * 1000)
        self._signature = signature
        self._open: dict[str, OpenRollout] = {}
        self._attempts: dict[str, dict[int, OpenRollout]] = {}
        self._orphans: Orphans[Held] = Orphans()
        self._due: list[tuple[int, str]] = []
        self._left_ms: int | None = None
        """The first deadline that has passed and was left to the next tick."""
        self._ledger = Ledger(self.name, mark, _refuse, keep=None)
        self._past: dict[str, None] = {}

    def apply(self, event: Event) -> Step:
        kind, fields = event.cls, event.fields
        if kind not in _NAMES_ITS_ITEM:
            raise StageError(f"join cannot use a {kind.__name__} from topic {event.position.noun!r}")
        item = f"{fields['rollout_id']}/{fields['attempt']}"
        if kind is RolloutOpened:
            self._supersede(fields["rollout_id"], fields["attempt"])
        if self._ledger.is_closed(item):
            return self._ledger.after_close(item, event)
        held = hold(event)
        rollout = self._open.get(item)
        if rollout is not None:
            return self._add(item, rollout, [held])
        if kind is RolloutOpened:
            return self._begin(item, OpenRollout(held, fields["opened_at_ms"]))
        self._orphans.add(item, held)
        return self._ledger.step()

    @property
    def pending_ms(self) -> int | None:
        return self._left_ms

    def tick(self, now_ms: int) -> Step:
        emits: list[Emit] = []
        num_bytes = 0
        while self._due and self._due[0][0] <= now_ms and num_bytes < CLOSED_AT_ONCE_BYTES:
            _, item = heapq.heappop(self._due)
            rollout = self._open.get(item)
            if rollout is not None:
                num_bytes += sum(len(held.event.value) for held in rollout.held())
                emits.append(self._close(item, rollout))
        self._left_ms = self._due[0][0] if self._due and self._due[0][0] <= now_ms else None
        given_up = tuple(self._no_opening(item, held) for item, held in self._orphans.tick(now_ms))
        return self._ledger.step(emits=tuple(emits), rejects=given_up)

    def own_output(self, event: Event) -> str | None:
        rollout = event.record
        if not isinstance(rollout, Rollout):
            return None
        item = f"{rollout.rollout_id}/{rollout.attempt}"
        self._ledger.read_back(item, lambda: marks_of(rollout))
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        rollout = self._open.get(item)
        if rollout is None:
            return self._ledger.done(item, self._orphans.take(item))
        refused = rollout.conflicts(item)
        self._end(item)
        return self._ledger.done(item, rollout.held(), refused)

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING

    def forget(self, item: str) -> None:
        """Before this the rollout's events may be read again, so it is remembered whatever the number."""
        self._past[item] = None
        while len(self._past) > self.kept_items:
            oldest = next(iter(self._past))
            del self._past[oldest]
            self._ledger.forget(oldest)

    def _begin(self, item: str, rollout: OpenRollout) -> Step:
        self._open[item] = rollout
        rollout_id, attempt = _attempt_of(item)
        self._attempts.setdefault(rollout_id, {})[attempt] = rollout
        heapq.heappush(self._due, (rollout.opened_ms + self._deadline_ms, item))
        return self._add(item, rollout, self._orphans.take(item))

    def _add(self, item: str, rollout: OpenRollout, events: list[Held]) -> Step:
        finished, rejects = [], []
        for held in events:
            verdict = rollout.add(held)
            if verdict == "duplicate":
                finished.append(held.event.position)
            elif verdict == "late":
                rejects.append(self._ledger.reject(held.event, *_late(held.event, item)))
        emits = (self._close(item, rollout),) if rollout.is_complete() else ()
        return self._ledger.step(emits, tuple(rejects), tuple(finished))

    def _supersede(self, rollout_id: str, by: int) -> None:
        for attempt, rollout in self._attempts.get(rollout_id, {}).items():
            if attempt < by:
                rollout.is_superseded |= not rollout.has_ended_in("calls")

    def _close(self, item: str, rollout: OpenRollout) -> Emit:
        self._end(item)
        refused = rollout.conflicts(item)
        record = rollout.to_record(rollout.opened_ms + self._deadline_ms, self._signature, refused)
        return Emit(item, (record,), self._ledger.close(item, marks_of(record), rollout.held(), refused))

    def _end(self, item: str) -> None:
        """The rollout is open no longer."""
        del self._open[item]
        rollout_id, attempt = _attempt_of(item)
        attempts = self._attempts[rollout_id]
        del attempts[attempt]
        if not attempts:
            del self._attempts[rollout_id]

    def _no_opening(self, item: str, held: Held) -> Reject:
        return self._ledger.reject(
            held.event,
            "no_opening",
            f"{held.kind.__name__} belongs to rollout {item!r}, whose opening is not in topic calls; it came long after the "
            "rollout was done, or the opening is lost: look at the rollout, and for its writer",
        )


def _attempt_of(item: str) -> tuple[str, int]:
    rollout_id, _, attempt = item.rpartition("/")
    return rollout_id, int(attempt)


def _refuse(event: Event, item: str, holds: Callable[[int], bool]) -> Refusal:
    record = event.record
    if isinstance(record, CallDelivery) and not holds(started_mark(record.call_id)):
        return "unknown_call", f"rollout {item!r} has no call {record.call_id!r} that could have been delivered"
    return _late(event, item)


def _late(event: Event, item: str) -> Refusal:
    return "late", (
        f"{type(event.record).__name__} came after rollout {item!r} was closed; finish a rollout only when its calls have "
        "ended, or raise join.deadline_s"
    )
