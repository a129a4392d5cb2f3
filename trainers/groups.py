"""Samples of one topic partition, put together to whole groups. Pure: no broker, no clock.

Build writes the samples of a group, then a `GroupBuilt` that names them all. Samples of several groups may lie between
each other, and a group may stand in the log twice, with the same ids. A record that cannot be read is noted by its key, the
group: a group that lacks samples because of it is complete without any, and never an error that comes again at each start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.errors import TrainerError
from rollstream.schemas.records import GroupBuilt, Sample
from rollstream.trainers.base import SampleGroup

REMEMBERED_GROUPS = 4_096
"""How many groups back a repetition is noticed. Repetitions come from a builder that restarted, so they are near."""

ABANDONED_AFTER_GROUPS = REMEMBERED_GROUPS // 2
"""Samples whose group is still without its record after so many whole groups are forgotten: their builder died and its
successor, with another pipeline, made other ones. They would hold the position back for ever, and the groups behind it would in
the end be more than are remembered, and come twice."""


@dataclass(frozen=True, slots=True)
class Complete:
    """A group that is whole; without samples there is nothing to train on."""

    built: GroupBuilt
    """Its marker."""
    samples: tuple[Sample, ...]
    """Its samples."""
    first: int
    """Offset of its first sample, or of the marker."""
    is_cut: bool = False
    """True if some of its samples were before the place where reading began."""
    is_unreadable: bool = False
    """True if a record of it could not be read."""

    @property
    def item(self) -> str:
        """Identity of the group."""
        return item_of(self.built.group_id, self.built.group_revision, self.built.pipeline_digest)

    def to_group(self) -> SampleGroup:
        """As trainers get it."""
        return SampleGroup(self.built, self.samples)


def item_of(group_id: str, revision: int, pipeline_digest: str) -> str:
    """Identity of a group; one group may be built by several pipelines."""
    return f"{group_id}/{revision}/{pipeline_digest}"


class GroupAssembler:
    """One partition. Args: partition: its number, for messages."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._next = 0
        self._samples: dict[str, dict[str, tuple[int, Sample]]] = {}
        """By group, then by sample id: offset and sample."""
        self._since: dict[str, int] = {}
        """How many groups were whole when the first sample of an open one came."""
        self._whole = 0
        self._unreadable: dict[str, tuple[int, int]] = {}
        """By group id: offset of its first record that could not be read, and how many groups were whole then."""
        self._ready: dict[str, Complete] = {}
        """Whole groups that nobody has taken."""
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._began_anywhere = True

    def add(self, offset: int, record: Sample | GroupBuilt) -> Complete | None:
        """See the next record.

        Returns: the group that it completes, once. Where reading did not begin at a position of ours, retention or a late
            start may have cut a group: it comes without samples and says so. So does one of which a record was unreadable.
        Raises: TrainerError: a group is cut after a position of ours, which never cuts one.
        """
        self._next = max(self._next, offset + 1)
        revision = record.group_revision
        item = item_of(record.group_id, revision, record.pipeline_digest)
        if item in self._taken or item in self._ready:
            return None
        if isinstance(record, Sample):
            self._samples.setdefault(item, {}).setdefault(record.sample_id, (offset, record))
            self._since.setdefault(item, self._whole)
            return None
        held = self._samples.pop(item, {})
        self._since.pop(item, None)
        self._whole += 1
        self._forget_abandoned()
        missing = [sample_id for sample_id in record.sample_ids if sample_id not in held]
        if missing and self._unreadable.pop(record.group_id, None) is not None:
            self._ready[item] = Complete(record, (), offset, is_unreadable=True)
            return self._ready[item]
        if missing and self._began_anywhere:
            self._ready[item] = Complete(record, (), offset, is_cut=True)
            return self._ready[item]
        if missing:
            raise TrainerError(
                f"cannot read group {record.group_id!r}: its record at partition {self._partition} offset {offset} names "
                f"{len(record.sample_ids)} samples, and {len(missing)} of them are not before it, for instance {missing[0]!r}; "
                "the topic's retention cut the group, or the position is not one that position() gave: seek to a later one",
                reason="group_cut",
            )
        first = min((held[sample_id][0] for sample_id in record.sample_ids), default=offset)
        complete = Complete(record, tuple(held[sample_id][1] for sample_id in record.sample_ids), first)
        self._ready[item] = complete
        return complete

    def add_unreadable(self, offset: int, group_id: str) -> None:
        """See a record that cannot be read. Args: group_id: its key."""
        self._next = max(self._next, offset + 1)
        self._unreadable.setdefault(group_id, (offset, self._whole))

    def take(self, item: str) -> None:
        """A group was handed out, or skipped for good."""
        self._ready.pop(item, None)
        self._taken[item] = None
        while len(self._taken) > REMEMBERED_GROUPS:
            self._taken.popitem(last=False)

    def skip_to(self, offset: int) -> None:
        """The log goes on at this offset: what lies before is not there any more, or is no sample."""
        self._next = max(self._next, offset)

    def position(self) -> dict[str, Any]:
        """From which offset to read again, and which groups from there on are done."""
        open_first = [offset for held in self._samples.values() for offset, _ in held.values()]
        open_first += [offset for offset, _ in self._unreadable.values()]
        offset = min([self._next, *open_first, *(complete.first for complete in self._ready.values())])
        return {"offset": offset, "done": list(self._taken), "began_anywhere": self._began_anywhere}

    def seek(self, position: Mapping[str, Any]) -> int:
        """Forget everything and go on from a position. Returns: the offset to read from."""
        self._samples, self._since, self._ready, self._unreadable = {}, {}, {}, {}
        # The group that retention cut may still have been open when the position was taken.
        self._began_anywhere = bool(position.get("began_anywhere", False))
        self._taken = OrderedDict.fromkeys(position["done"])
        self._next = int(position["offset"])
        return self._next

    def _forget_abandoned(self) -> None:
        for group_id in [g for g, (_, since) in self._unreadable.items() if self._is_abandoned(since)]:
            del self._unreadable[group_id]
        while self._since:
            item, since = next(iter(self._since.items()))  # the longest open one: they are kept in order
            if not self._is_abandoned(since):
                return
            del self._since[item], self._samples[item]

    def _is_abandoned(self, since: int) -> bool:
        return self._whole - since > ABANDONED_AFTER_GROUPS


def refusal(
    complete: Complete,
    *,
    policy: str,
    version: int,
    max_staleness: int | None = None,
    skip_no_spread: bool = False,
    revisions: bool = False,
) -> str | None:
    """Why a group is not handed out; None if it is.

    Args:
        policy: groups of another one are not handed out.
        version: the trainer's policy version.
        max_staleness: most versions that a group's oldest token may be behind; None takes all.
        skip_no_spread: whether groups in which every advantage is 0 are not handed out.
        revisions: whether later revisions of a group are: a trainer that takes them sees its first members twice.
    """
    if complete.is_unreadable:
        return "unreadable"
    if complete.built.group_revision and not revisions:
        return "revision"
    if not complete.samples:
        return "cut" if complete.is_cut else "no_samples"
    if any(sample.policy != policy for sample in complete.samples):
        return "other_policy"
    if skip_no_spread and not complete.built.has_spread:
        return "no_spread"
    if max_staleness is not None and complete.to_group().staleness(version) > max_staleness:
        return "stale"
    return None
