"""What became of a stage's items: on their way out, or done, and what each was made of.

An item is closed once the stage has emitted it, or once the stage's own output says that an earlier run did. From then on
one question decides what happens to each of its events: is what the event says part of what was written? If so, it is
a repetition and is let go of. If not, it goes to the dead letters. That holds for events that come later, for those that
were held while a closed item was unknown (a restart reads half of them again), and is why no offset is ever compared.

What an item was made of is kept as *marks*: 64-bit hashes of content, valid in this process. A done item costs its name
and 8 bytes a mark. The last `KEPT_ITEMS` are kept; what comes for an older one is taken for a new item, as after a restart
that begins behind it. A stage whose own output is held back from commit (`Stage.remembers_ms`) keeps them until it is
told to `forget`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from rollstream.processors.base import NOTHING, Emit, Event, Position, Reject, Step
from rollstream.schemas.records import Record

Refusal = tuple[str, str]
"""Reason code and message of a dead letter."""

KEPT_ITEMS = 20_000
"""Done items that a stage remembers in one partition: hours of them, while repetitions come within minutes."""

ORPHAN_AFTER_MS = 30_000
"""How long, in tick time, something must have been without what it belongs to before it is let go of. Ticks come only while
everything upstream is read to its end, so nothing is under way; but the clocks of two machines differ by seconds."""


@dataclass(slots=True)
class Marked:
    """An event and its mark, which is computed once: when somebody asks for it, or by whoever has the record at hand."""

    event: Event
    """The event."""
    mark: int | None
    """What it says; None while nobody has asked."""

    def marked(self, mark: Callable[[Record], int]) -> int:
        """Its mark. Decodes the event if it is not known. Args: mark: computes it."""
        if self.mark is None:
            self.mark = mark(self.event.record)
        return self.mark


_NONE: Mapping[Position, Refusal] = MappingProxyType({})


class Ledger:
    """Closed items of one stage and partition."""

    def __init__(
        self,
        boundary: str,
        mark: Callable[[Record], int],
        refuse: Callable[[Event, str, Callable[[int], bool]], Refusal],
        keep: int | None = KEPT_ITEMS,
    ) -> None:
        """
        Args:
            boundary: the stage's name, for dead letters.
            mark: what a record says, as a number; equal for what the stage holds to be equal.
            refuse: why an event is not part of its closed item; gets event, item, and whether the item holds a mark.
            keep: how many done items to remember; None: all, until they are forgotten.
        """
        self._boundary = boundary
        self._mark = mark
        self._refuse = refuse
        self._keep = keep
        self._leaving: dict[str, _Leaving] = {}
        self._made_of: dict[str, frozenset[int] | array[int]] = {}
        self._rejects: list[Reject] = []

    def is_closed(self, item: str) -> bool:
        """Whether the item was emitted here or by an earlier run."""
        return item in self._made_of

    def is_done(self, item: str) -> bool:
        """Whether the item's output is known to be in the log."""
        return item in self._made_of and item not in self._leaving

    def close(
        self,
        item: str,
        marks: Iterable[int],
        events: Iterable[Event | Marked],
        refused: Mapping[Position, Refusal] = _NONE,
    ) -> tuple[Position, ...]:
        """The item is on its way out.

        Args:
            marks: what it was made of.
            events: all events held for it; those whose mark is not known are decoded for it.
            refused: those of them of which more is known than that they are not part of it.

        Returns: the events that it was made of.
        """
        self._made_of[item] = frozenset(marks)
        held = tuple(self._marked(events))
        used, others = self._split(item, held, refused)
        self._leaving[item] = _Leaving(held, refused, used, others)
        return used

    def read_back(self, item: str, marks: Callable[[], Iterable[int]]) -> None:
        """The stage's own output holds the item: what it says it was made of counts, whatever this run made of it."""
        if self.is_done(item):
            return
        self._made_of[item] = frozenset(marks())
        leaving = self._leaving.get(item)
        if leaving is not None:
            used, others = self._split(item, leaving.held, leaving.refused)
            self._leaving[item] = _Leaving(leaving.held, leaving.refused, used, others)

    def done(
        self, item: str, held: Iterable[Event | Marked] = (), refused: Mapping[Position, Refusal] = _NONE
    ) -> tuple[Position, ...]:
        """The item is in the log for good.

        Args:
            held: events still held for it because this run did not know.
            refused: as in `close`.

        Returns: the events that are part of it. The others become dead letters with the next step.
        """
        leaving = self._leaving.pop(item, None)
        used, others = self._split(item, self._marked(held), refused)
        if leaving is not None:
            used, others = leaving.used + used, leaving.others + others
        self._rejects.extend(others)
        self._made_of[item] = array("q", self._made_of.get(item, ()))
        self._forget_oldest()
        return used

    def after_close(self, item: str, event: Event, mark: int | None = None) -> Step:
        """What to do with an event of a closed item. Args: mark: its mark, where it is known."""
        if self._holds(item, self._mark(event.record) if mark is None else mark):
            return self.step(finished=(event.position,))
        return self.step(rejects=(self._refused(item, event),))

    def forget(self, item: str) -> None:
        """Remember a done item no longer; one that is on its way out stays."""
        if item not in self._leaving:
            self._made_of.pop(item, None)

    def reject(self, event: Event, reason: str, message: str) -> Reject:
        """A dead letter of this stage."""
        return Reject(event, self._boundary, reason, message)

    def step(
        self, emits: tuple[Emit, ...] = (), rejects: tuple[Reject, ...] = (), finished: tuple[Position, ...] = ()
    ) -> Step:
        """A step, with the dead letters that have been waiting for their item to be done."""
        if self._rejects:
            rejects, self._rejects = (*rejects, *self._rejects), []
        return Step(emits, rejects, finished) if emits or rejects or finished else NOTHING

    def _forget_oldest(self) -> None:
        if self._keep is None:
            return
        while len(self._made_of) > self._keep and (oldest := next(iter(self._made_of))) not in self._leaving:
            del self._made_of[oldest]

    def _holds(self, item: str, mark: int) -> bool:
        return mark in self._made_of.get(item, ())

    def _refused(self, item: str, event: Event) -> Reject:
        return self.reject(event, *self._refuse(event, item, lambda mark: self._holds(item, mark)))

    def _marked(self, events: Iterable[Event | Marked]) -> Iterator[Marked]:
        for one in events:
            yield one if isinstance(one, Marked) else Marked(one, None)

    def _split(
        self, item: str, held: Iterable[Marked], refused: Mapping[Position, Refusal]
    ) -> tuple[tuple[Position, ...], tuple[Reject, ...]]:
        used, others = [], []
        for one in held:
            position = one.event.position
            if self._holds(item, one.marked(self._mark)):
                used.append(position)
            elif position in refused:
                others.append(self.reject(one.event, *refused[position]))
            else:
                others.append(self._refused(item, one.event))
        return tuple(used), tuple(others)


class _Leaving(NamedTuple):
    """A closed item whose output is not acknowledged yet."""

    held: tuple[Marked, ...]
    """All events held for it."""
    refused: Mapping[Position, Refusal]
    """What is known of those that are not part of it."""
    used: tuple[Position, ...]
    """Those it was made of."""
    others: tuple[Reject, ...]
    """What becomes of the rest."""
