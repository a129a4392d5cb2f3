"""A stage that turns one record into one record and remembers nothing but what is on its way out.

A record that comes again while its output is on the way is let go of with it. One that comes later makes the same output
again, with the same bytes; the stages behind drop it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rollstream.processors.base import NOTHING, Emit, Event, Position, Step
from rollstream.schemas.records import GroupCredits, GroupRewards, Record


@dataclass(slots=True)
class _Leaving:
    digest: str
    positions: list[Position]


class OneToOne(ABC):
    """One record in, one record out, one item a group."""

    name: str
    inputs: tuple[str, ...]
    output: str
    reads_own_output = False

    def __init__(self) -> None:
        self._leaving: dict[str, _Leaving] = {}

    @abstractmethod
    def make(self, record: Record) -> GroupRewards | GroupCredits:
        """The output of an input.

        Raises: StageError: the record is not one that this stage reads.
        """

    def apply(self, event: Event) -> Step:
        made = self.make(event.record)
        item = f"{made.group.group_id}/{made.group.revision}"
        leaving = self._leaving.get(item)
        if leaving is not None and leaving.digest != made.digest:
            item = f"{item}/{made.digest}"
            leaving = self._leaving.get(item)
        if leaving is not None:
            leaving.positions.append(event.position)
            return NOTHING
        self._leaving[item] = _Leaving(made.digest, [event.position])
        return Step(emits=(Emit(item, (made,), (event.position,)),))

    def tick(self, now_ms: int) -> Step:
        return NOTHING

    def own_output(self, event: Event) -> str | None:
        return None

    def item_done(self, item: str) -> tuple[Position, ...]:
        leaving = self._leaving.pop(item, None)
        return tuple(leaving.positions) if leaving else ()

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING
