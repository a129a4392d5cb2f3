"""Group: rollouts of one group become one `Group`, closed when full or by its deadline.

* Full: as many rollouts are in as the group shall have. Who came first does not matter.
* Deadline: `deadline_s` after the earliest of its rollouts closed, event time. With at least `min_size` rollouts it is a
  `timeout` and is trained on; with fewer it is `partial` and is not. Rollouts that closed later than that are late even if
  they were read before, so that a rebuild from the log decides the same.
* A rollout counts once, with its highest attempt: a lower one goes to the dead letters (`superseded`), and so does the same
  attempt with other content (`conflict`).
* A rollout whose status is not among `counts` fills no place: it goes to the dead letters (`not_counted`), and the group waits
  for another one until its deadline.
* What comes when the group is closed goes to the dead letters: `group_full` if no place was free, else `late_for_group`. With
  `late: revision`, a rollout that closed up to `revise_within_s` after its group gives a new `Group` with the next revision
  instead: one late member each, in log order, each made from the revision before it once that is in the log. A record is never
  changed. A further attempt of a member is no late member.

The stage remembers what it closed for `remember_s`: its own output is read back that far, so a restart makes no second group of
what comes late. The group knows its rollouts only once they are closed, so a place that nobody filled is `not_in_time`,
whether its rollout was never opened, is still running, or came late.
"""

from __future__ import annotations

import heapq

from rollstream.processors.base import NOTHING, Emit, Event, Position, Reject, Step
from rollstream.processors.closed_group import ClosedGroup
from rollstream.processors.config import GroupConfig, Signature
from rollstream.processors.ledger import KEPT_ITEMS, ORPHAN_AFTER_MS, Refusal
from rollstream.processors.open_group import Held, OpenGroup, hold, revised
from rollstream.schemas.records import Group


class GroupStage:
    """Group, for one partition."""

    name = "group"
    inputs: tuple[str, ...] = ("rollouts",)
    output = "groups"
    reads_own_output = True
    pending_ms = None

    def __init__(self, config: GroupConfig, signature: Signature) -> None:
        self.remembers_ms = round(config.remember_s * 1000)
        self._deadline_ms = round(config.deadline_s * 1000)
        self._min_size = config.min_size
        self._counts = frozenset(config.counts)
        self._revise_ms = config.retain_ms
        self._signature = signature
        self._open: dict[str, OpenGroup] = {}
        self._closed: dict[str, ClosedGroup] = {}
        self._due: list[tuple[int, str]] = []
        """When which open group's time is over; entries of groups that were closed before are stale."""
        self._final: list[tuple[int, str]] = []
        """From when on which closed group has no further revision."""
        self._settling: list[str] = []
        """Groups that were done since the last step while rollouts waited for it."""
        self._emits: list[Emit] = []
        self._rejects: list[Reject] = []
        self._finished: list[Position] = []

    def apply(self, event: Event) -> Step:
        held = hold(event)
        self._settle()
        closed = self._closed.get(held.group_id)
        if closed is None:
            self._take(held)
        elif closed.is_done or closed.holds(held.digest):
            self._decide(closed, held, None)
        else:
            closed.waiting.append((held, None))
        return self._step()

    def tick(self, now_ms: int) -> Step:
        self._settle()
        while self._due and self._due[0][0] <= now_ms:
            due_ms, group_id = heapq.heappop(self._due)
            group = self._open.get(group_id)
            if group is not None and group.due_ms <= due_ms:
                self._close(group_id, group)
        while self._final and self._final[0][0] <= now_ms:
            _, group_id = heapq.heappop(self._final)
            closed = self._closed.get(group_id)
            if closed is not None and closed.is_done and self._final_ms(closed) <= now_ms:
                closed.group = None
        return self._step()

    def own_output(self, event: Event) -> str | None:
        group = event.record
        if not isinstance(group, Group):
            return None
        closed = self._closed.get(group.group_id)
        if closed is not None:
            closed.read_back(group)
        else:
            opened = self._open.pop(group.group_id, None)
            self._closed[group.group_id] = (
                ClosedGroup(group) if opened is None else ClosedGroup(group, opened.held, opened.refused)
            )
        return f"{group.group_id}/{group.revision}"

    def item_done(self, item: str) -> tuple[Position, ...]:
        group_id, _, revision = item.rpartition("/")
        closed = self._closed.get(group_id)
        if closed is None or closed.is_done or closed.revision != int(revision):
            return ()
        finished = closed.done()
        if closed.waiting:
            self._settling.append(group_id)
        if closed.is_full or not self._revise_ms:
            closed.group = None
        else:
            heapq.heappush(self._final, (self._final_ms(closed), group_id))
        if not self.remembers_ms:
            self._forget_oldest()
        return tuple(finished)

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING

    def forget(self, item: str) -> None:
        self._settle()
        group_id, _, revision = item.rpartition("/")
        closed = self._closed.get(group_id)
        if closed is not None and closed.is_done and closed.revision == int(revision):
            del self._closed[group_id]

    def _forget_oldest(self) -> None:
        """Keep what is remembered within bounds where the shell does not say when to forget."""
        while len(self._closed) > KEPT_ITEMS:
            group_id, oldest = next(iter(self._closed.items()))
            if not oldest.is_done or oldest.waiting:
                return
            del self._closed[group_id]

    def _take(self, held: Held) -> None:
        """A rollout of a group that is not closed."""
        if held.member.status not in self._counts:
            self._reject(held, self._not_counted(held))
            return
        group = self._open.get(held.group_id)
        due_ms = None
        if group is None:
            group = self._open[held.group_id] = OpenGroup(self._deadline_ms)
        else:
            due_ms = group.due_ms
        if not group.add(held):
            self._finished.append(held.position)
            return
        if group.due_ms != due_ms:
            heapq.heappush(self._due, (group.due_ms, held.group_id))
        if group.is_full:
            self._close(held.group_id, group)

    def _close(self, group_id: str, group: OpenGroup) -> None:
        del self._open[group_id]
        record = group.to_record(self._min_size, self._signature)
        closed = self._closed[group_id] = ClosedGroup(record, group.held, group.refused)
        used = tuple(held.position for held in group.held if closed.holds(held.digest))
        self._emits.append(Emit(f"{group_id}/0", (record,), used))

    def _settle(self) -> None:
        """Decide on the rollouts that waited for their group's record to be in the log."""
        settling, self._settling = self._settling, []
        for group_id in settling:
            closed = self._closed.get(group_id)
            while closed is not None and closed.is_done and closed.waiting:
                self._decide(closed, *closed.waiting.popleft())

    def _decide(self, closed: ClosedGroup, held: Held, refusal: Refusal | None) -> None:
        """What becomes of a rollout that came when its group was closed."""
        if closed.holds(held.digest):
            self._finished.append(held.position)
            return
        refusal = refusal or self._refusal(closed, held)
        if refusal is not None:
            self._reject(held, refusal)
        elif closed.group is not None:
            record = revised(closed.group, held, self._min_size, self._signature)
            closed.write(record, [held])
            self._emits.append(Emit(f"{held.group_id}/{record.revision}", (record,), (held.position,)))

    def _refusal(self, closed: ClosedGroup, held: Held) -> Refusal | None:
        """Why a rollout is no late member that makes a revision; None if it is one."""
        if held.member.status not in self._counts:
            return self._not_counted(held)
        if closed.holds_attempt(held):
            return "conflict", (
                f"{held.what} is in closed group {held.group_id!r} with other content than {held.digest}; two joins with "
                "different configuration wrote it"
            )
        if closed.is_full:
            return "group_full", (
                f"{held.what} came when all places of group {held.group_id!r} were taken; open further rollouts under "
                "another group_id, or the group with a larger group_size"
            )
        is_in_time = held.member.closed_at_ms <= closed.closed_at_ms + self._revise_ms
        if closed.group is None or not is_in_time or closed.holds_rollout(held.member.rollout_id):
            return "late_for_group", (
                f"{held.what} came after group {held.group_id!r} was closed; if rollouts take that long, raise "
                "group.deadline_s, or set group.late to 'revision'"
            )
        return None

    def _not_counted(self, held: Held) -> Refusal:
        return "not_counted", (
            f"{held.what} has status {held.member.status.value!r}, and group.counts is "
            f"{sorted(status.value for status in self._counts)}; run it again as another attempt or rollout of the group"
        )

    def _final_ms(self, closed: ClosedGroup) -> int:
        return closed.closed_at_ms + self._revise_ms + ORPHAN_AFTER_MS

    def _reject(self, held: Held, refusal: Refusal) -> None:
        self._rejects.append(Reject(held.event, self.name, *refusal))

    def _step(self) -> Step:
        step = Step(tuple(self._emits), tuple(self._rejects), tuple(self._finished))
        self._emits, self._rejects, self._finished = [], [], []
        return step if step.emits or step.rejects or step.finished else NOTHING
