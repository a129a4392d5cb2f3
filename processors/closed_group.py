"""A group that is closed: what it was made of, and the rollouts whose fate waits until its record is in the log.

A closed group is remembered as 64-bit hashes of its members, two for each. Its record is kept only while a late member may
still give it a revision.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rollstream.processors.base import Position
from rollstream.processors.ledger import Refusal
from rollstream.processors.open_group import Held
from rollstream.schemas.records import Group, GroupClose

_NONE: Mapping[Position, Refusal] = MappingProxyType({})


class ClosedGroup:
    """The last revision of a group."""

    __slots__ = (
        "_leaving",
        "_marks",
        "_refused",
        "closed_at_ms",
        "group",
        "is_done",
        "is_full",
        "revision",
        "waiting",
    )

    def __init__(self, group: Group, held: Iterable[Held] = (), refused: Mapping[Position, Refusal] = _NONE) -> None:
        """Args: held: rollouts that are held for it, members or not; refused: of some, why they are none."""
        self.waiting: deque[tuple[Held, Refusal | None]] = deque()
        """Rollouts that came when the group was closed and its record not yet in the log, in log order."""
        self._leaving: list[Held] = []
        self._refused = refused
        self.write(group, held)

    def write(self, group: Group, held: Iterable[Held]) -> None:
        """A revision is on its way out. Args: held: the rollouts that wait for it."""
        self._leaving += held
        self._adopt(group)
        self.is_done = False
        """Whether the record is known to be in the log."""

    def read_back(self, group: Group) -> None:
        """The log holds a revision: what it says counts, whatever this run made of it."""
        if group.revision > self.revision or (group.revision == self.revision and not self.is_done):
            self._adopt(group)
            self.is_done = False

    def done(self) -> list[Position]:
        """The revision is in the log. Returns: the events that are part of it; the others wait to be decided on."""
        self.is_done = True
        others = [held for held in self._leaving if not self.holds(held.digest)]
        finished = [held.position for held in self._leaving if self.holds(held.digest)]
        self.waiting.extendleft((held, self._refused.get(held.position)) for held in reversed(others))
        self._leaving, self._refused = [], _NONE
        return finished

    def holds(self, digest: str) -> bool:
        """Whether a rollout is a member."""
        return self._has(hash(digest))

    def holds_attempt(self, held: Held) -> bool:
        """Whether another content of the same attempt is a member."""
        return self._has(_attempt_mark(held.member.rollout_id, held.member.attempt))

    def holds_rollout(self, rollout_id: str) -> bool:
        """Whether any attempt of a rollout is a member, of a group whose record is kept."""
        return self.group is not None and any(member.rollout_id == rollout_id for member in self.group.members)

    def _adopt(self, group: Group) -> None:
        self.revision = group.revision
        """The last revision."""
        self.group: Group | None = group
        """Its record, while there may be a next one."""
        self.closed_at_ms = group.closed_at_ms
        """When it was closed, event time."""
        self.is_full = group.closed_by is GroupClose.FULL
        """Whether no place is free."""
        marks = [hash(member.rollout_digest) for member in group.members]
        marks += [_attempt_mark(member.rollout_id, member.attempt) for member in group.members]
        self._marks = array("q", sorted(marks))

    def _has(self, mark: int) -> bool:
        at = bisect_left(self._marks, mark)
        return at < len(self._marks) and self._marks[at] == mark


def _attempt_mark(rollout_id: str, attempt: int) -> int:
    return hash((rollout_id, attempt))
