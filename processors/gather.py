"""Gather: a group's rollouts and the record that decides about them, in whichever order they come.

Score waits for the `Group`, build for the `GroupCredits`; both then need the members' rollouts. Rollouts that the
decision does not name are let go of: the group stage has put them into the dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollstream.errors import StageError
from rollstream.processors.base import Event, Position, Step
from rollstream.processors.ledger import Ledger, Refusal
from rollstream.schemas.records import Group, GroupCredits, Record, Rollout


@dataclass(slots=True)
class Gathered:
    """What is in of one group."""

    rollouts: dict[str, Event] = field(default_factory=dict)
    """Rollouts by digest."""
    decision: Event | None = None
    """The deciding record."""

    def rollout(self, digest: str) -> Rollout:
        """A rollout that is in. Raises: KeyError: it is not."""
        record = self.rollouts[digest].record
        if not isinstance(record, Rollout):
            raise StageError(f"cannot use a {type(record).__name__}, expected a Rollout")
        return record


class Gather:
    """Open and closed groups of one stage and partition."""

    def __init__(self, boundary: str) -> None:
        """Args: boundary: the stage's name, for dead letters."""
        self.ledger = Ledger(boundary, _mark, _conflict)
        self._open: dict[str, Gathered] = {}

    def take(self, event: Event) -> tuple[str, Step]:
        """See a rollout or a deciding record.

        Returns: the item it belongs to, and what to do with it if it is not kept.
        """
        record = event.record
        if isinstance(record, Rollout):
            return self._take_rollout(f"{record.group_id}/0", event, record)
        group = group_of(record)
        return self._take_decision(f"{group.group_id}/{group.revision}", event, group)

    def wants(self, item: str, digest: str) -> bool:
        """Whether a rollout is held."""
        return item in self._open and digest in self._open[item].rollouts

    def complete(self, item: str) -> Gathered | None:
        """What is in of an open group, once the decision and all rollouts it names are."""
        gathered = self._open.get(item)
        if gathered is None or gathered.decision is None:
            return None
        members = group_of(gathered.decision.record).members
        return gathered if all(member.rollout_digest in gathered.rollouts for member in members) else None

    def close(self, item: str) -> tuple[Position, ...]:
        """The group's output is on its way. Returns: what it was made of."""
        events = list(_events(self._open.pop(item)))
        return self.ledger.close(item, [_ANY_ROLLOUT, *(_mark(event.record) for event in events)], events)

    def done(self, item: str) -> tuple[Position, ...]:
        """The group's output is in the log. Returns: what to let go of."""
        gathered = self._open.pop(item, None)
        return self.ledger.done(item, _events(gathered) if gathered else ())

    def _take_rollout(self, item: str, event: Event, rollout: Rollout) -> tuple[str, Step]:
        gathered = None if self.ledger.is_closed(item) else self._open.setdefault(item, Gathered())
        if gathered is None or rollout.digest in gathered.rollouts or not _may_belong(gathered, rollout):
            return item, self.ledger.step(finished=(event.position,))
        gathered.rollouts[rollout.digest] = event
        return item, self.ledger.step()

    def _take_decision(self, item: str, event: Event, group: Group) -> tuple[str, Step]:
        if self.ledger.is_closed(item):
            return item, self.ledger.after_close(item, event)
        gathered = self._open.setdefault(item, Gathered())
        if gathered.decision is not None:
            if _mark(gathered.decision.record) == _mark(event.record):
                return item, self.ledger.step(finished=(event.position,))
            reason, message = _conflict(event, item, lambda mark: False)
            return item, self.ledger.step(rejects=(self.ledger.reject(event, reason, message),))
        gathered.decision = event
        members = {member.rollout_digest for member in group.members}
        strangers = [digest for digest in gathered.rollouts if digest not in members]
        return item, self.ledger.step(finished=tuple(gathered.rollouts.pop(digest).position for digest in strangers))


def group_of(record: Record) -> Group:
    """The group that a deciding record is about."""
    if isinstance(record, Group):
        return record
    if isinstance(record, GroupCredits):
        return record.group
    raise StageError(f"cannot use a {type(record).__name__}, expected a Rollout, Group or GroupCredits")


def marks_of_decision(digest: str) -> list[int]:
    """What a closed group was made of, by the digest of its deciding record: that, and whatever rollouts come."""
    return [_ANY_ROLLOUT, hash(digest)]


_ANY_ROLLOUT = 0
"""All rollouts bear one mark: which of them count was decided before, so none is ever news."""


def _mark(record: Record) -> int:
    return _ANY_ROLLOUT if isinstance(record, Rollout) else hash(getattr(record, "digest", ""))


def _may_belong(gathered: Gathered, rollout: Rollout) -> bool:
    if gathered.decision is None:
        return True
    return any(member.rollout_digest == rollout.digest for member in group_of(gathered.decision.record).members)


def _events(gathered: Gathered) -> Iterable[Event]:
    yield from gathered.rollouts.values()
    if gathered.decision is not None:
        yield gathered.decision


def _conflict(event: Event, item: str, holds: Callable[[int], bool]) -> Refusal:
    del holds
    return "conflict", (
        f"group {item!r} has two records of type {type(event.record).__name__} with different content; two processes with "
        "different configuration wrote it, and the first counts"
    )
