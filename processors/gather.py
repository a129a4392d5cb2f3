"""Gather: a group's rollouts and the record that decides about them, in whichever order they come.

Score waits for the `Group`, build for the `GroupCredits`; both then need the members' rollouts. They are held as events, by
digest, and decoded when something is made of them. Rollouts that the decision does not name are let go of: the group stage
has put them into the dead letters. Where groups may be revised (`group.late: revision`), a group's rollouts are held for
`revise_within_s` after its closing instead, uncommitted, so that a restart has them again.

What is left over when everything is read to its end belongs to something that is long done (`already_done`):

* a decision whose rollouts are not in. They came before it, so they were read, used and committed by an earlier run. It is let
  go of once that has been so for `ORPHAN_AFTER_MS`;
* a rollout that no decision names. The group stage decides within `deadline_s`, and while a scorer has the rollout, no time
  passes here; so it is let go of when the group stage has forgotten the group, too. One that does not count for its group is
  no member of anything, and goes without a further dead letter when the group's time is over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.errors import StageError
from rollstream.processors.base import Event, Position, Reject, Step
from rollstream.processors.config import GroupConfig
from rollstream.processors.ledger import ORPHAN_AFTER_MS, Ledger, Marked, Refusal
from rollstream.schemas.records import Group, GroupCredits, Record, Rollout


@dataclass(slots=True)
class Decision:
    """A deciding record that nothing was made of yet."""

    event: Event
    """Its event."""
    item: str
    """What is made of it."""
    digest: str
    """Digest of the record."""
    group: Group
    """The group that it is about."""
    members: frozenset[str]
    """Digests of the group's rollouts."""
    missing: set[str]
    """Digests of members whose rollouts are not in."""
    unscored: set[str] = field(default_factory=set)
    """Digests of members that have not all their scores; used by score alone."""
    missing_since_ms: int | None = None
    """When rollouts were first found to be missing with everything read."""


class _Rollout(NamedTuple):
    """A rollout that is in."""

    event: Event
    """Its event."""
    undecided_ms: int
    """From when on nobody decides about it any more."""
    counts: bool
    """Whether it may be a member of its group."""


@dataclass(slots=True)
class _Gathered:
    """What is in of one group."""

    rollouts: dict[str, _Rollout] = field(default_factory=dict)
    """By digest."""
    decisions: dict[str, Decision] = field(default_factory=dict)
    """By item."""
    kept_until_ms: int = 0
    """Until when the rollouts are kept for revisions; 0 before the first revision is made."""
    undecided_since_ms: int | None = None
    """When it was first found that nobody decides about them."""


class Gather:
    """Open and closed groups of one stage and partition."""

    def __init__(
        self,
        boundary: str,
        decides: type[Group | GroupCredits],
        group: GroupConfig,
        gone: Callable[[str], object] = lambda digest: None,
    ) -> None:
        """
        Args:
            boundary: the stage's name, for dead letters.
            decides: the class of the deciding records.
            group: what the group stage does.
            gone: called with the digest of each rollout that is not held any more.
        """
        self.ledger = Ledger(boundary, _mark, _conflict)
        self._boundary = boundary
        self._decides = decides
        self._gone = gone
        self._counts = frozenset(group.counts)
        self._deadline_ms = round(group.deadline_s * 1000)
        self._remembers_ms = round(group.remember_s * 1000)
        self._retain_ms = group.retain_ms
        self._open: dict[str, _Gathered] = {}
        self._leaving: dict[str, tuple[Position, ...]] = {}
        """Rollouts that an item on its way out was made of."""
        self._incomplete: dict[str, Decision] = {}
        """Decisions with rollouts missing, by item."""
        self._undecided: list[tuple[int, str]] = []
        """When to look whether somebody has decided about a group."""
        self._kept: list[tuple[int, str]] = []
        """When to let go of a group's rollouts."""

    def take(self, event: Event) -> tuple[str, Step]:
        """See a rollout or a deciding record.

        Returns: the group it belongs to, and what to do with it if it is not kept.
        Raises: StageError: it is neither.
        """
        record = event.record
        if isinstance(record, Rollout):
            return record.group_id, self._take_rollout(event, record)
        if not isinstance(record, self._decides):
            raise StageError(
                f"{self._boundary} cannot use a {type(record).__name__}, expected a Rollout or {self._decides.__name__}"
            )
        group = record if isinstance(record, Group) else record.group
        return group.group_id, self._take_decision(event, group, record.digest)

    def holds(self, group_id: str, digest: str) -> bool:
        """Whether a rollout is held."""
        return group_id in self._open and digest in self._open[group_id].rollouts

    def is_open(self, group_id: str) -> bool:
        """Whether anything is held, or kept in mind, of a group."""
        return group_id in self._open

    def is_made(self, group_id: str) -> bool:
        """Whether a revision of a group was made, and its rollouts are only kept for the next one."""
        return group_id in self._open and self._open[group_id].kept_until_ms > 0

    def decisions(self, group_id: str) -> list[Decision]:
        """The decisions about a group that nothing was made of yet."""
        return list(self._open[group_id].decisions.values()) if group_id in self._open else []

    def event(self, group_id: str, digest: str) -> Event:
        """A rollout that is in. Raises: KeyError: it is not."""
        return self._open[group_id].rollouts[digest].event

    def rollout(self, group_id: str, digest: str) -> Rollout:
        """A rollout that is in, decoded. Raises: KeyError: it is not."""
        record = self.event(group_id, digest).record
        if not isinstance(record, Rollout):
            raise StageError(f"cannot use a {type(record).__name__}, expected a Rollout")
        return record

    def close(self, decision: Decision) -> tuple[Position, ...]:
        """The output of a decision is on its way.

        Returns: what it was made of and is let go of with it. Rollouts that are kept for a revision are not among that.
        """
        group_id = decision.group.group_id
        mark = hash(decision.digest)
        used = self.ledger.close(decision.item, [mark], [Marked(decision.event, mark)])
        self._forget(decision)
        if self._retain_ms:
            self._keep(group_id, decision.group.closed_at_ms)
        elif not self._open[group_id].decisions:
            self._leaving[decision.item] = tuple(self._drop(group_id))
            used = self._leaving[decision.item] + used
        return used

    def read_back(self, item: str, group_id: str, digest: str, closed_at_ms: int) -> None:
        """The stage's own output holds an item. Args: digest: of the deciding record."""
        self.ledger.read_back(item, lambda: [hash(digest)])
        if self._retain_ms:
            self._keep(group_id, closed_at_ms)

    def done(self, item: str) -> tuple[Position, ...]:
        """The output of an item is in the log. Returns: what to let go of."""
        group_id = item.rpartition("/")[0]
        positions = self._leaving.pop(item, ())
        gathered = self._open.get(group_id)
        decision = None
        if gathered is not None:
            decision = gathered.decisions.get(item)
            if decision is not None:
                self._forget(decision)
            if not gathered.decisions and not gathered.kept_until_ms:
                positions += tuple(self._drop(group_id))
        held = () if decision is None else (Marked(decision.event, hash(decision.digest)),)
        return positions + self.ledger.done(item, held)

    def tick(self, now_ms: int) -> Step:
        """Let go of what nothing will be made of, now that everything is read."""
        rejects = [
            reject for decision in list(self._incomplete.values()) for reject in self._orphan(decision, now_ms)
        ]
        finished: list[Position] = []
        while self._undecided and self._undecided[0][0] <= now_ms:
            _, group_id = heapq.heappop(self._undecided)
            rejects += self._give_up(group_id, now_ms, finished)
        while self._kept and self._kept[0][0] <= now_ms:
            _, group_id = heapq.heappop(self._kept)
            gathered = self._open.get(group_id)
            if gathered is not None and gathered.kept_until_ms <= now_ms and not gathered.decisions:
                finished += self._drop(group_id)
        return self.ledger.step(rejects=tuple(rejects), finished=tuple(finished))

    def _take_rollout(self, event: Event, rollout: Rollout) -> Step:
        gathered = self._open.get(rollout.group_id)
        if gathered is None and self.ledger.is_closed(f"{rollout.group_id}/0"):
            return self.ledger.step(finished=(event.position,))
        if gathered is None:
            gathered = self._open[rollout.group_id] = _Gathered()
        if rollout.digest in gathered.rollouts or self._is_stranger(gathered, rollout.digest):
            return self.ledger.step(finished=(event.position,))
        counts = rollout.status in self._counts
        undecided_ms = rollout.closed_at_ms + self._deadline_ms + (self._remembers_ms if counts else 0)
        if not gathered.rollouts:
            heapq.heappush(self._undecided, (undecided_ms, rollout.group_id))
        gathered.rollouts[rollout.digest] = _Rollout(event, undecided_ms, counts)
        for decision in gathered.decisions.values():
            decision.missing.discard(rollout.digest)
            if not decision.missing:
                self._incomplete.pop(decision.item, None)
        return self.ledger.step()

    def _take_decision(self, event: Event, group: Group, digest: str) -> Step:
        item = f"{group.group_id}/{group.revision}"
        if self.ledger.is_closed(item):
            return self.ledger.after_close(item, event, hash(digest))
        gathered = self._open.setdefault(group.group_id, _Gathered())
        held = gathered.decisions.get(item)
        if held is not None and held.digest == digest:
            return self.ledger.step(finished=(event.position,))
        if held is not None:
            reason, message = _conflict(event, item, lambda mark: False)
            return self.ledger.step(rejects=(self.ledger.reject(event, reason, message),))
        members = frozenset(member.rollout_digest for member in group.members)
        missing = set(members.difference(gathered.rollouts))
        decision = gathered.decisions[item] = Decision(event, item, digest, group, members, missing)
        if missing:
            self._incomplete[item] = decision
        strangers = [digest for digest in gathered.rollouts if self._is_stranger(gathered, digest)]
        return self.ledger.step(finished=tuple(self._release(gathered, strangers)))

    def _is_stranger(self, gathered: _Gathered, digest: str) -> bool:
        """Whether a rollout is decided to be no member."""
        if self._retain_ms or not gathered.decisions:
            return False
        return not any(digest in decision.members for decision in gathered.decisions.values())

    def _forget(self, decision: Decision) -> None:
        del self._open[decision.group.group_id].decisions[decision.item]
        self._incomplete.pop(decision.item, None)

    def _keep(self, group_id: str, closed_at_ms: int) -> None:
        gathered = self._open.setdefault(group_id, _Gathered())
        until_ms = closed_at_ms + self._retain_ms + ORPHAN_AFTER_MS
        gathered.kept_until_ms = max(gathered.kept_until_ms, until_ms)
        heapq.heappush(self._kept, (gathered.kept_until_ms, group_id))

    def _drop(self, group_id: str) -> list[Position]:
        gathered = self._open.pop(group_id)
        return self._release(gathered, list(gathered.rollouts))

    def _release(self, gathered: _Gathered, digests: Iterable[str]) -> list[Position]:
        positions = []
        for digest in digests:
            positions.append(gathered.rollouts.pop(digest).event.position)
            self._gone(digest)
        return positions

    def _orphan(self, decision: Decision, now_ms: int) -> list[Reject]:
        """Dead letters of a decision, and of the rollouts that wait for it alone, once it has been an orphan for long enough."""
        if decision.missing_since_ms is None:
            decision.missing_since_ms = now_ms
        if now_ms - decision.missing_since_ms < ORPHAN_AFTER_MS:
            return []
        group_id = decision.group.group_id
        gathered = self._open[group_id]
        self._forget(decision)
        self.ledger.close(decision.item, [hash(decision.digest)], ())
        self.ledger.done(decision.item)
        message = (
            f"{len(decision.missing)} of {len(decision.group.members)} rollouts of group {decision.item!r} are not in the log "
            f"from where it is read, for instance {min(decision.missing)}; an earlier run has made what there is to make of "
            "it, or retention took them: see whether the group is in the stage's output, and rebuild it if not"
        )
        events = [decision.event]
        if gathered.kept_until_ms:
            heapq.heappush(self._kept, (gathered.kept_until_ms, group_id))
        elif not gathered.decisions:
            events += [held.event for held in gathered.rollouts.values()]
            self._drop(group_id)
        return [self.ledger.reject(event, "already_done", message) for event in events]

    def _give_up(self, group_id: str, now_ms: int, finished: list[Position]) -> list[Reject]:
        """Dead letters of rollouts that nobody has decided about, and nobody will. Args: finished: those that need none."""
        gathered = self._open.get(group_id)
        if gathered is None or gathered.decisions or gathered.kept_until_ms or not gathered.rollouts:
            return []
        due = {digest: held for digest, held in gathered.rollouts.items() if held.undecided_ms <= now_ms}
        if due and gathered.undecided_since_ms is None:
            gathered.undecided_since_ms = now_ms
        if due and now_ms - (gathered.undecided_since_ms or now_ms) < ORPHAN_AFTER_MS:
            heapq.heappush(self._undecided, (now_ms + ORPHAN_AFTER_MS, group_id))
            return []
        self._release(gathered, due)
        gathered.undecided_since_ms = None
        if gathered.rollouts:
            next_ms = min(held.undecided_ms for held in gathered.rollouts.values())
            heapq.heappush(self._undecided, (next_ms, group_id))
        else:
            del self._open[group_id]
        message = (
            f"no record of group {group_id!r} has decided about this rollout, and the group stage has forgotten the group by "
            "now; it came when its group was long done: look for its other dead letter, and rebuild the group if it has none"
        )
        finished += [held.event.position for held in due.values() if not held.counts]
        return [self.ledger.reject(held.event, "already_done", message) for held in due.values() if held.counts]


def _mark(record: Record) -> int:
    return hash(getattr(record, "digest", ""))


def _conflict(event: Event, item: str, holds: Callable[[int], bool]) -> Refusal:
    del holds
    return "conflict", (
        f"group {item!r} has two records of type {type(event.record).__name__} with different content; two processes with "
        "different configuration wrote it, and the first counts"
    )
