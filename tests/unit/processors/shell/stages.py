"""Small stages for the shell's tests: a join by barrier, a group by size, and one that passes everything on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rollstream.errors import StageError
from rollstream.processors.base import NOTHING, Emit, Event, Position, Reject, Step, Work
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import (
    ClosedBy,
    EnvironmentEvent,
    EventKind,
    Group,
    GroupClose,
    GroupMember,
    Rollout,
    RolloutOpened,
    RolloutStatus,
    StageRef,
    Terminal,
)
from rollstream.schemas.types import Json

SOURCES = ("calls", "environment", "terminals")
_REF = StageRef("fake", "fake", 1, "0")


def opened(rollout: str, *, group: str = "g", size: int = 2, at_ms: int = 1_000) -> RolloutOpened:
    """The opening of a rollout."""
    return RolloutOpened(rollout, 0, group, size, "task", at_ms)


def observed(rollout: str, text: str, *, group: str = "g", at_ms: int = 1_000) -> EnvironmentEvent:
    """An environment event."""
    return EnvironmentEvent(f"{rollout}:{text}", rollout, 0, group, EventKind.OBSERVATION, Json(f'"{text}"'), at_ms)


def ended(rollout: str, *, group: str = "g", size: int = 2, at_ms: int = 2_000) -> Terminal:
    """A rollout's barrier."""
    return Terminal(rollout, 0, group, size, "task", RolloutStatus.SUCCEEDED, at_ms)


@dataclass
class _Open:
    opening: RolloutOpened | None
    events: list[EnvironmentEvent]
    barriers: set[str]
    held: list[Position]


class Join:
    """Emits a rollout once its terminal was seen in all three topics."""

    name = "join"
    inputs = SOURCES
    bug: str | None = '"bug"'
    output = "rollouts"
    reads_own_output = True
    pending_ms: int | None = None
    remembers_ms = 0

    def __init__(self) -> None:
        self.open: dict[str, _Open] = {}
        self.done: set[str] = set()
        self.ticks: list[int] = []
        self.forgotten: list[str] = []

    def apply(self, event: Event) -> Step:
        record = event.record
        item = f"{record.rollout_id}/{record.attempt}"
        if isinstance(record, EnvironmentEvent):
            if record.content == '"poison"':
                raise StageError("cannot join: poison", reason="poison")
            if record.content == self.bug:
                raise ZeroDivisionError("a bug in the stage")
            if record.content == '"refused"':
                return Step(rejects=(Reject(event, "join", "refused", "not wanted"),))
        if item in self.done:
            return Step(finished=(event.position,))
        state = self.open.setdefault(item, _Open(None, [], set(), []))
        state.held.append(event.position)
        if isinstance(record, RolloutOpened):
            state.opening = record
        elif isinstance(record, EnvironmentEvent):
            state.events.append(record)
        elif isinstance(record, Terminal):
            state.barriers.add(event.position.noun)
        if state.barriers == set(SOURCES):
            return Step(emits=(Emit(item, (self._rollout(state, record),), tuple(state.held)),))
        return NOTHING

    def _rollout(self, state: _Open, end: Terminal) -> Rollout:
        size = state.opening.group_size if state.opening else 0
        return with_digest(
            Rollout(
                end.rollout_id, end.attempt, end.group_id, size, end.task_id, Json("{}"), "default", end.status,
                end.outcome, ClosedBy.BARRIER, (), (), tuple(state.events), 0, end.finished_at_ms, "", _REF, "p", "0",
            )
        )  # fmt: skip

    def tick(self, now_ms: int) -> Step:
        self.ticks.append(now_ms)
        return NOTHING

    def own_output(self, event: Event) -> str | None:
        return f"{event.record.rollout_id}/{event.record.attempt}"

    def item_done(self, item: str) -> tuple[Position, ...]:
        self.done.add(item)
        state = self.open.pop(item, None)
        return () if state is None else tuple(state.held)

    def forget(self, item: str) -> None:
        self.forgotten.append(item)

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING


class Gather:
    """Emits a group once all its rollouts are in; `work` makes a slow work for each rollout first.

    A member of a closed group is rejected as late for as long as the group is remembered.
    """

    name = "group"
    inputs = ("rollouts",)
    output = "groups"
    reads_own_output = True
    pending_ms: int | None = None

    def __init__(self, work: Callable[[Rollout], Work] | None = None, *, remembers_ms: int = 0) -> None:
        self.remembers_ms = remembers_ms
        self.open: dict[str, dict[str, tuple[Position, Rollout]]] = {}
        self.done: set[str] = set()
        self.ticks: list[int] = []
        self.work = work
        self.results: dict[str, object] = {}
        self.members: dict[str, set[str]] = {}
        self.forgotten: list[str] = []

    def apply(self, event: Event) -> Step:
        record = event.record
        item = f"{record.group_id}/0"
        if item in self.done and self.remembers_ms and record.rollout_id not in self.members[item]:
            return Step(rejects=(Reject(event, "group", "late_for_group", "the group is closed"),))
        members = self.open.setdefault(item, {})
        if item in self.done or record.rollout_id in members:
            return Step(finished=(event.position,))
        members[record.rollout_id] = (event.position, record)
        if self.work is not None:
            return Step(work=(self.work(record),))
        return self._emit_if_full(item)

    def _emit_if_full(self, item: str) -> Step:
        members = self.open[item]
        rollouts = [members[name][1] for name in sorted(members)]
        waits = self.work is not None and not members.keys() <= self.results.keys()
        if len(members) < rollouts[0].group_size or waits:
            return NOTHING
        told = tuple(GroupMember(r.rollout_id, r.attempt, r.digest, r.status, 0, 0, r.closed_at_ms) for r in rollouts)
        group = Group(
            rollouts[0].group_id, 0, len(told), "task", GroupClose.FULL, told, (),
            max(r.closed_at_ms for r in rollouts), "", _REF, "p", "0",
        )  # fmt: skip
        return Step(emits=(Emit(item, (with_digest(group),), tuple(p for p, _ in members.values())),))

    def tick(self, now_ms: int) -> Step:
        self.ticks.append(now_ms)
        return NOTHING

    def own_output(self, event: Event) -> str | None:
        item = f"{event.record.group_id}/{event.record.revision}"
        self.members[item] = {member.rollout_id for member in event.record.members}
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        self.done.add(item)
        members = self.open.pop(item, {})
        self.members.setdefault(item, set(members))
        return tuple(position for position, _ in members.values())

    def forget(self, item: str) -> None:
        self.forgotten.append(item)
        self.done.discard(item)
        self.members.pop(item, None)

    def work_done(self, key: str, result: object) -> Step:
        self.results[key] = result
        return self._emit_if_full(next(item for item, members in self.open.items() if key in members))


class Relabel:
    """Stateless, one output for one input, as reward and credit are: passes a group on, one stage further."""

    reads_own_output = False
    pending_ms: int | None = None
    remembers_ms = 0

    def __init__(self, name: str, reads: str, writes: str) -> None:
        self.name = name
        self.inputs = (reads,)
        self.output = writes
        self.leaving: dict[str, list[Position]] = {}

    def apply(self, event: Event) -> Step:
        record = event.record
        assert isinstance(record, Group)
        record = replace(record, pipeline=self.name)
        item = f"{record.group_id}/0"
        self.leaving.setdefault(item, []).append(event.position)
        return Step(emits=(Emit(item, (record,), (event.position,)),))

    def tick(self, now_ms: int) -> Step:
        return NOTHING

    def own_output(self, event: Event) -> str | None:
        return None

    def item_done(self, item: str) -> tuple[Position, ...]:
        return tuple(self.leaving.pop(item, ()))

    def forget(self, item: str) -> None:
        del item

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING
