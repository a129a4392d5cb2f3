"""A stage that turns one record into one record.

Each different input is an item of its own, named by the digest of what is made from it. It reads its own output back, so that
a record which comes again, or is read again after a restart, makes nothing new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rollstream.processors.base import NOTHING, Emit, Event, Position, Step
from rollstream.processors.ledger import KEPT_ITEMS
from rollstream.schemas.records import GroupCredits, GroupRewards, Record


class OneToOne(ABC):
    """One record in, one record out, one item a group."""

    name: str
    inputs: tuple[str, ...]
    output: str
    reads_own_output = True
    pending_ms = None
    remembers_ms = 0

    def __init__(self) -> None:
        self._leaving: dict[str, list[Position]] = {}
        self._done: dict[str, None] = {}

    @abstractmethod
    def make(self, record: Record) -> GroupRewards | GroupCredits:
        """The output of an input.

        Raises: StageError: the record is not one that this stage reads.
        """

    def apply(self, event: Event) -> Step:
        made = self.make(event.record)
        item = _item(made)
        if item in self._done:
            return Step(finished=(event.position,))
        if item in self._leaving:
            self._leaving[item].append(event.position)
            return NOTHING
        self._leaving[item] = [event.position]
        return Step(emits=(Emit(item, (made,), (event.position,)),))

    def tick(self, now_ms: int) -> Step:
        return NOTHING

    def own_output(self, event: Event) -> str | None:
        made = event.record
        return _item(made) if isinstance(made, GroupRewards | GroupCredits) else None

    def item_done(self, item: str) -> tuple[Position, ...]:
        self._done[item] = None
        if len(self._done) > KEPT_ITEMS:
            del self._done[next(iter(self._done))]
        return tuple(self._leaving.pop(item, ()))

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING

    def forget(self, item: str) -> None:
        del item  # a copy of its input may still come; `KEPT_ITEMS` bounds what is remembered


def _item(made: GroupRewards | GroupCredits) -> str:
    return f"{made.group.group_id}/{made.group.revision}/{made.digest}"
