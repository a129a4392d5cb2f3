"""A group that is not closed: who is in, who is refused and why, and the record that it becomes.

It knows its rollouts by their summaries, as the record lists them, and keeps their events for what may have to go to the dead
letters. A rollout is decoded once, when it comes, and adding one costs no more in a group of ten thousand than in one of four.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from rollstream.errors import StageError
from rollstream.processors.base import Event, Position
from rollstream.processors.config import Signature
from rollstream.processors.ledger import Refusal
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import Group, GroupClose, GroupMember, MissingMember, Rollout


class Held(NamedTuple):
    """A rollout as group holds it."""

    event: Event
    """Its event."""
    member: GroupMember
    """What the group's record says of it."""
    group_id: str
    """Its group."""
    group_size: int
    """How many rollouts it says the group shall have."""
    task_id: str
    """Name of its task."""

    @property
    def digest(self) -> str:
        """Digest of the rollout."""
        return self.member.rollout_digest

    @property
    def position(self) -> Position:
        """Where it stands."""
        return self.event.position

    @property
    def what(self) -> str:
        """Its name in messages."""
        return f"rollout {self.member.rollout_id!r} attempt {self.member.attempt}"


def hold(event: Event) -> Held:
    """The summary of a rollout.

    Raises: StageError: the event is no rollout.
    """
    rollout = event.record
    if not isinstance(rollout, Rollout):
        raise StageError(f"group cannot use a {type(rollout).__name__}, expected a Rollout")
    member = GroupMember(
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
    return Held(event, member, rollout.group_id, rollout.group_size, rollout.task_id)


class OpenGroup:
    """A group that is not closed."""

    __slots__ = ("_closed_ms", "_deadline_ms", "_members", "_size", "held", "refused")

    def __init__(self, deadline_ms: int) -> None:
        """Args: deadline_ms: how long after its first rollout closed the group is closed."""
        self.held: list[Held] = []
        """All rollouts held for it, in log order, refused ones among them."""
        self.refused: dict[Position, Refusal] = {}
        """Those that are no members, and why."""
        self._deadline_ms = deadline_ms
        self._members: dict[str, Held] = {}
        self._closed_ms: list[int] = []
        """When the members closed, sorted."""
        self._size = 0

    @property
    def due_ms(self) -> int:
        """When its time is over."""
        return self._closed_ms[0] + self._deadline_ms

    @property
    def is_full(self) -> bool:
        """Whether all rollouts that it shall have are in, in time."""
        return len(self._members) >= self._size and bisect_right(self._closed_ms, self.due_ms) >= self._size

    def add(self, held: Held) -> bool:
        """Returns: False if the rollout is in already."""
        name, attempt = held.member.rollout_id, held.member.attempt
        before = self._members.get(name)
        if before is not None and before.digest == held.digest:
            return False
        self.held.append(held)
        self._size = max(self._size, held.group_size)
        if before is not None and before.member.attempt == attempt:
            self.refused[held.position] = (
                "conflict",
                f"{held.what} is in the group with digest {before.digest}, got {held.digest}; two joins with different "
                "configuration wrote it",
            )
            return True
        if before is not None:
            lower, higher = (held, before) if before.member.attempt > attempt else (before, held)
            self.refused[lower.position] = (
                "superseded",
                f"{lower.what}: attempt {higher.member.attempt} of it is in the group; only the highest one counts",
            )
            if lower is held:
                return True
            self._closed_ms.pop(bisect_left(self._closed_ms, lower.member.closed_at_ms))
        self._members[name] = held
        insort(self._closed_ms, held.member.closed_at_ms)
        return True

    def to_record(self, min_size: int, signature: Signature) -> Group:
        """The group as it stands, of those that closed before its time was over."""
        in_time = sorted(
            (held for held in self._members.values() if held.member.closed_at_ms <= self.due_ms),
            key=lambda held: held.member.rollout_id,
        )
        members = tuple(held.member for held in in_time)
        is_full = len(members) >= self._size
        return with_digest(
            Group(
                group_id=in_time[0].group_id,
                revision=0,
                group_size=self._size,
                task_id=in_time[0].task_id,
                closed_by=_closed_by(len(members), self._size, min_size),
                members=members,
                missing=_missing(len(members), self._size),
                closed_at_ms=max(member.closed_at_ms for member in members) if is_full else self.due_ms,
                digest="",
                stage=signature.stage,
                pipeline=signature.pipeline,
                pipeline_digest=signature.pipeline_digest,
            )
        )


def revised(group: Group, late: Held, min_size: int, signature: Signature) -> Group:
    """The next revision of a group: all its members and a late one."""
    members = tuple(sorted((*group.members, late.member), key=lambda member: member.rollout_id))
    size = max(group.group_size, late.group_size)
    return with_digest(
        Group(
            group_id=group.group_id,
            revision=group.revision + 1,
            group_size=size,
            task_id=group.task_id,
            closed_by=_closed_by(len(members), size, min_size),
            members=members,
            missing=_missing(len(members), size),
            closed_at_ms=max(group.closed_at_ms, late.member.closed_at_ms),
            digest="",
            stage=signature.stage,
            pipeline=signature.pipeline,
            pipeline_digest=signature.pipeline_digest,
        )
    )


def _closed_by(members: int, size: int, min_size: int) -> GroupClose:
    if members >= size:
        return GroupClose.FULL
    return GroupClose.TIMEOUT if members >= min_size else GroupClose.PARTIAL


def _missing(members: int, size: int) -> tuple[MissingMember, ...]:
    """Places that nobody filled; they have no names.

    Whether a rollout came late or never is not known when its group is closed in time, and is when a rebuild reads all of the
    log first: a record that said it would depend on who made it.
    """
    return (MissingMember("not_in_time"),) * max(size - members, 0)
