"""Group: rollouts of one group become one `Group`, closed when full or by its deadline.

* Full: as many rollouts are in as the group shall have. Who came first does not matter.
* Deadline: `deadline_s` after the earliest of its rollouts closed, event time. With at least `min_size` rollouts it is a
  `timeout` and is trained on; with fewer it is `partial` and is not. Rollouts that closed later than that are late even if
  they were read before, so that a rebuild from the log decides the same.
* A rollout counts once, with its highest attempt: a lower one goes to the dead letters (`superseded`). The same attempt with
  other content does too (`conflict`), and so does whatever comes when the group is closed (`late_for_group`).

The group knows its rollouts only once they are closed, so a missing one is `not_in_time`, whether it was never opened
or is still running.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rollstream.errors import StageError
from rollstream.processors.base import NOTHING, Emit, Event, Position, Step
from rollstream.processors.config import GroupConfig, Signature
from rollstream.processors.ledger import Ledger, Refusal
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import Group, GroupClose, GroupMember, MissingMember, Record, Rollout


class GroupStage:
    """Group, for one partition."""

    name = "group"
    inputs: tuple[str, ...] = ("rollouts",)
    output = "groups"
    reads_own_output = True
    remembers_ms = 0

    def __init__(self, config: GroupConfig, signature: Signature) -> None:
        self._deadline_ms = round(config.deadline_s * 1000)
        self._min_size = config.min_size
        self._signature = signature
        self._open: dict[str, _Open] = {}
        self._due: list[tuple[int, str]] = []
        self._ledger = Ledger(self.name, _mark, _refuse)

    def apply(self, event: Event) -> Step:
        rollout = _rollout(event.record)
        item = f"{rollout.group_id}/0"
        if self._ledger.is_closed(item):
            return self._ledger.after_close(item, event)
        group = self._open.get(item)
        if group is None:
            group = self._open[item] = _Open()
        first_ms = group.first_ms
        if not group.add(event, rollout):
            return self._ledger.step(finished=(event.position,))
        if group.first_ms != first_ms:
            heapq.heappush(self._due, (group.first_ms + self._deadline_ms, item))
        if len(group.members) >= group.size:
            return self._ledger.step(emits=(self._close(item, group),))
        return self._ledger.step()

    def tick(self, now_ms: int) -> Step:
        emits = []
        while self._due and self._due[0][0] <= now_ms:
            due_ms, item = heapq.heappop(self._due)
            group = self._open.get(item)
            if group is not None and group.first_ms + self._deadline_ms <= due_ms:
                emits.append(self._close(item, group))
        return self._ledger.step(emits=tuple(emits))

    def own_output(self, event: Event) -> str | None:
        group = event.record
        if not isinstance(group, Group):
            return None
        item = f"{group.group_id}/{group.revision}"
        self._ledger.read_back(item, lambda: [hash(member.rollout_digest) for member in group.members])
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        group = self._open.pop(item, None)
        return self._ledger.done(item, group.events if group else ())

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING

    def forget(self, item: str) -> None:
        """Nothing: what is remembered is bounded by the ledger."""

    def _close(self, item: str, group: _Open) -> Emit:
        del self._open[item]
        record = group.to_record(group.first_ms + self._deadline_ms, self._min_size, self._signature)
        marks = [hash(member.rollout_digest) for member in record.members]
        return Emit(item, (record,), self._ledger.close(item, marks, group.events, group.refused))


class _Open:
    """A group that is not closed."""

    __slots__ = ("events", "first_ms", "members", "refused", "size")

    def __init__(self) -> None:
        self.members: dict[str, tuple[Rollout, Position]] = {}
        self.events: list[Event] = []
        """All events held, members' and refused ones."""
        self.refused: dict[Position, Refusal] = {}
        self.first_ms = 1 << 62
        """When the earliest member closed."""
        self.size = 0

    def add(self, event: Event, rollout: Rollout) -> bool:
        """Returns: False if the rollout is in already."""
        held = self.members.get(rollout.rollout_id)
        if held is not None and held[0].digest == rollout.digest:
            return False
        self.events.append(event)
        self.size = max(self.size, rollout.group_size)
        what = f"rollout {rollout.rollout_id!r}"
        if held is not None and held[0].attempt == rollout.attempt:
            self.refused[event.position] = (
                "conflict",
                f"{what} attempt {rollout.attempt} is in the group with digest {held[0].digest}, got {rollout.digest}; two "
                "joins with different configuration wrote it",
            )
            return True
        if held is not None:
            lower = event.position if held[0].attempt > rollout.attempt else held[1]
            self.refused[lower] = ("superseded", f"{what} has a higher attempt in the group; only that one counts")
            if lower is event.position:
                return True
        self.members[rollout.rollout_id] = (rollout, event.position)
        self.first_ms = min(rollout.closed_at_ms for rollout, _ in self.members.values())
        return True

    def to_record(self, deadline_ms: int, min_size: int, signature: Signature) -> Group:
        """The group as it stands."""
        found = sorted((rollout for rollout, _ in self.members.values()), key=lambda rollout: rollout.rollout_id)
        in_time = [rollout for rollout in found if rollout.closed_at_ms <= deadline_ms]
        late = [rollout for rollout in found if rollout.closed_at_ms > deadline_ms]
        if len(in_time) >= self.size:
            closed_by = GroupClose.FULL
        else:
            closed_by = GroupClose.TIMEOUT if len(in_time) >= min_size else GroupClose.PARTIAL
        missing = [MissingMember("late_for_group", rollout.rollout_id) for rollout in late]
        missing += [MissingMember("not_in_time")] * (self.size - len(found))
        return with_digest(
            Group(
                group_id=found[0].group_id,
                revision=0,
                group_size=self.size,
                task_id=found[0].task_id,
                closed_by=closed_by,
                members=tuple(_member(rollout) for rollout in in_time),
                missing=tuple(missing),
                closed_at_ms=max(r.closed_at_ms for r in found) if closed_by is GroupClose.FULL else deadline_ms,
                digest="",
                stage=signature.stage,
                pipeline=signature.pipeline,
                pipeline_digest=signature.pipeline_digest,
            )
        )


def _member(rollout: Rollout) -> GroupMember:
    return GroupMember(
        rollout_id=rollout.rollout_id,
        attempt=rollout.attempt,
        rollout_digest=rollout.digest,
        status=rollout.status,
        num_calls=len(rollout.calls),
        trainable_tokens=sum(len(call.output_ids) // 4 for call in rollout.calls if call.trainable),
        closed_at_ms=rollout.closed_at_ms,
        version_min=rollout.version_min,
        version_max=rollout.version_max,
    )


def _mark(record: Record) -> int:
    return hash(_rollout(record).digest)


def _rollout(record: Record) -> Rollout:
    if not isinstance(record, Rollout):
        raise StageError(f"group cannot use a {type(record).__name__}, expected a Rollout")
    return record


def _refuse(event: Event, item: str, holds: Callable[[int], bool]) -> Refusal:
    del holds
    rollout = _rollout(event.record)
    return "late_for_group", (
        f"rollout {rollout.rollout_id!r} attempt {rollout.attempt} came after group {item!r} was closed; a group "
        "that was full needs another group_id for further rollouts, and one that timed out a larger group.deadline_s"
    )
