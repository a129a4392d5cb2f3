"""Join: the records of a rollout, from three topics, become one `Rollout`.

A rollout is complete when its terminal has been read in `calls`, `environment` and `terminals`. Within a topic, order is
the log's; across topics there is none, and the rollout does not depend on it:

* A record behind its own topic's terminal is late, whether or not the other terminals are in; except that as long as fewer
  are in than the terminal's `expected_*` counts, it is taken. If the counts still differ at the deadline, the rollout is written
  as `aborted`: what came is accounted for and nothing is trained on.
* A repeated record with the same content is dropped. The same call or event id with other content sends both to the
  dead letters (`conflict`); of openings, intents and terminals, which a client may repeat, the first counts.
* A rollout that is not complete `deadline_s` after its opening is closed as `timed_out`. What happened later than that is
  late even if it was read before, so that a rebuild from the log decides the same.
* A rollout that does not fit into a record of Kafka is written as `aborted` with nothing in it, and what it would hold goes to
  the dead letters (`too_large`): it stops neither the worker nor its group.
* Attempts are rollouts of their own, `rollout_id/attempt`. If a higher attempt is opened before the lower one's terminal
  (in the log of `calls`), the lower one ends as `aborted`, whatever its terminal says.

Late is never dropped: it goes to the dead letters with its bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rollstream.errors import StageError
from rollstream.processors.base import NOTHING, Emit, Event, Position, Step
from rollstream.processors.config import JoinConfig, Signature
from rollstream.processors.content import mark, marks_of, started_mark
from rollstream.processors.ledger import Ledger, Refusal
from rollstream.processors.open_rollout import OpenRollout
from rollstream.schemas.codec import encode_body
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
from rollstream.settings import MAX_VALUE_BYTES

_NAMES_ITS_ITEM = (RolloutOpened, CallStarted, ModelCall, CallDelivery, EnvironmentEvent, Terminal)


class JoinStage:
    """Join, for one partition."""

    name = "join"
    inputs: tuple[str, ...] = TERMINAL_TOPICS
    output = "rollouts"
    reads_own_output = True
    remembers_ms = 0

    def __init__(self, config: JoinConfig, signature: Signature) -> None:
        self._deadline_ms = round(config.deadline_s * 1000)
        self._signature = signature
        self._open: dict[str, OpenRollout] = {}
        self._due: list[tuple[int, str]] = []
        self._ledger = Ledger(self.name, mark, _refuse)

    def apply(self, event: Event) -> Step:
        record = event.record
        if not isinstance(record, _NAMES_ITS_ITEM):
            raise StageError(f"join cannot use a {type(record).__name__} from topic {event.position.noun!r}")
        item = f"{record.rollout_id}/{record.attempt}"
        if isinstance(record, RolloutOpened):
            self._supersede(record)
        if self._ledger.is_closed(item):
            return self._ledger.after_close(item, event)
        rollout = self._open.get(item)
        if rollout is None:
            rollout = self._open[item] = OpenRollout()
        started_ms = rollout.started_ms
        verdict = rollout.add(event)
        if rollout.started_ms != started_ms:
            heapq.heappush(self._due, (rollout.started_ms + self._deadline_ms, item))
        if verdict == "duplicate":
            return self._ledger.step(finished=(event.position,))
        if verdict == "late":
            return self._ledger.step(rejects=(self._ledger.reject(event, *_late(event, item)),))
        if rollout.is_complete():
            return self._ledger.step(emits=self._close(item, rollout))
        return self._ledger.step()

    def tick(self, now_ms: int) -> Step:
        emits: list[Emit] = []
        while self._due and self._due[0][0] <= now_ms:
            due_ms, item = heapq.heappop(self._due)
            rollout = self._open.get(item)
            if rollout is not None and rollout.started_ms + self._deadline_ms <= due_ms:
                emits.extend(self._close(item, rollout))
        return self._ledger.step(emits=tuple(emits))

    def own_output(self, event: Event) -> str | None:
        rollout = event.record
        if not isinstance(rollout, Rollout):
            return None
        item = f"{rollout.rollout_id}/{rollout.attempt}"
        self._ledger.read_back(item, lambda: marks_of(rollout))
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        rollout = self._open.pop(item, None)
        return self._ledger.done(item, rollout.events() if rollout else ())

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING

    def forget(self, item: str) -> None:
        """Nothing: what is remembered is bounded by the ledger."""

    def _supersede(self, opened: RolloutOpened) -> None:
        if opened.attempt == 0:
            return
        for item, rollout in self._open.items():
            rollout_id, _, attempt = item.rpartition("/")
            if rollout_id == opened.rollout_id and int(attempt) < opened.attempt:
                rollout.is_superseded |= ("terminal", "calls") not in rollout.slots

    def _close(self, item: str, rollout: OpenRollout) -> tuple[Emit, ...]:
        """The rollout leaves; nothing is emitted if nobody knows what it belongs to."""
        del self._open[item]
        events = list(rollout.events())
        refused = rollout.conflicts(item)
        deadline_ms = rollout.started_ms + self._deadline_ms
        record = rollout.to_record(deadline_ms, self._signature, refused)
        why = "no_opening", f"rollout {item!r} has neither an opening nor a terminal; look for its producer"
        if record is not None and _is_too_large(record, events):
            message = (
                f"rollout {item!r} has more than {MAX_VALUE_BYTES} bytes, too large for a record; give large contents by "
                "reference (`content_ref`), or end rollouts earlier"
            )
            why = "too_large", message
            refused = {event.position: why for event in events}
            rollout.is_superseded = True
            record = rollout.to_record(deadline_ms, self._signature, refused)
            if record is not None and _is_too_large(record, events):  # by its task and outcome alone
                record = None
        if record is None:
            self._ledger.close(item, (), events, {event.position: why for event in events})
            self._ledger.done(item)
            return ()
        return (Emit(item, (record,), self._ledger.close(item, marks_of(record), events, refused)),)


def _is_too_large(record: Rollout, events: list[Event]) -> bool:
    """Whether a rollout does not fit into a record; cheap for all that are not nearly too large."""
    return sum(len(event.value) for event in events) > MAX_VALUE_BYTES and len(encode_body(record)) > MAX_VALUE_BYTES


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
