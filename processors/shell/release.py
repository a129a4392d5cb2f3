"""When a stage's own output, read back, may be let go of.

An own output is what a restart learns from: which items are done, and what they were made of. It stays uncommitted

* until the watermarks of all its inputs have passed what it was made from: before that a restart would read one half of them
  again, and build the item from that half;
* and, where the stage remembers (`Stage.remembers_ms`), until everything that is held or unread upstream of the stage in
  this process was appended that much later: before that a late member could still come and find its group unknown.

The second holds back the offset that is committed, and nothing else: the topic's other readers are finished with the event. So
what they have finished is committed beside the offset (`Mark`), and a restart reads what lies between for the memory alone.

With its release the stage hears `forget`: no restart will tell it of the item again.
What waits costs a place, an item's name, and in the first case the offsets it waits for.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from sys import intern
from typing import NamedTuple

from rollstream.processors.shell.hosted import Hosted
from rollstream.processors.shell.ledger import Ledger


class OwnOutput(NamedTuple):
    """A record of a stage's own output topic."""

    owner: Hosted
    """Whose output."""
    offset: int
    """Where it stands in the stage's output topic."""
    item: str | None
    """What it finishes; None for a record that finishes nothing, which is not remembered."""
    appended_ms: int
    """When the broker appended it."""


class Releases:
    """The own outputs of one partition number that wait to be let go of."""

    def __init__(self, ledgers: Mapping[str, Ledger]) -> None:
        """Args: ledgers: topic noun → who holds which of its events."""
        self._ledgers = ledgers
        self._ticket = count()
        self._behind: dict[str, list[tuple[int, int, OwnOutput, tuple[tuple[str, int], ...]]]] = {
            noun: [] for noun in ledgers
        }
        self._remembered: dict[str, list[tuple[int, int, str]]] = {}
        self._owners: dict[str, Hosted] = {}

    @property
    def waiting(self) -> int:
        """How many own outputs wait."""
        return sum(len(heap) for heaps in (self._behind, self._remembered) for heap in heaps.values())

    def add(self, own: OwnOutput, used: Mapping[str, int]) -> None:
        """An own output was read. Args: used: topic noun → highest offset that it was made from."""
        self._wait(own, tuple((intern(noun), offset) for noun, offset in used.items()))

    def settle(self) -> None:
        """Go on with those whose inputs have been passed by the watermarks."""
        has_moved = True
        while has_moved:
            has_moved = False
            for noun, heap in self._behind.items():
                mark = self._ledgers[noun].watermark if heap else None
                while heap and mark is not None and heap[0][0] < mark:
                    _, _, own, used = heapq.heappop(heap)
                    self._wait(own, used)
                    has_moved = True

    def tick(self, caught_up_ms: Mapping[str, int | None]) -> None:
        """Forget what nobody can be late for any more.

        Args: caught_up_ms: topic noun → wall clock at which it was proven to be read to its end; None while behind.
        """
        for noun, heap in self._remembered.items():
            stage = self._owners[noun].stage
            oldest_ms = self._oldest_ms(self._owners[noun], caught_up_ms) if heap else None
            while heap and oldest_ms is not None and oldest_ms - heap[0][1] >= stage.remembers_ms:
                stage.forget(heapq.heappop(heap)[2])

    def remember(self, own: OwnOutput) -> None:
        """Nothing but the stage's memory needs an own output any more."""
        stage = own.owner.stage
        self._ledgers[stage.output].release(own.offset, own.owner.bit)
        if own.item is None:
            return
        if not stage.remembers_ms:
            stage.forget(own.item)
            return
        self._owners[stage.output] = own.owner
        heapq.heappush(self._remembered.setdefault(stage.output, []), (own.offset, own.appended_ms, own.item))

    def first_remembered(self, noun: str) -> int | None:
        """Where the oldest remembered output of a topic stands; None if none is."""
        heap = self._remembered.get(noun)
        return heap[0][0] if heap else None

    def _wait(self, own: OwnOutput, used: tuple[tuple[str, int], ...]) -> None:
        for index, (noun, offset) in enumerate(used):
            ledger = self._ledgers.get(noun)
            if ledger is not None and ((mark := ledger.watermark) is None or mark <= offset):
                heapq.heappush(self._behind[noun], (offset, next(self._ticket), own, used[index:]))
                return
        self.remember(own)

    def _oldest_ms(self, owner: Hosted, caught_up_ms: Mapping[str, int | None]) -> int | None:
        """A time before which nothing was appended that is held or unread upstream; None if none is known."""
        oldest_ms: list[int] = []
        for noun in owner.needs - {owner.stage.output}:
            ledger = self._ledgers[noun]
            times_ms = [ledger.oldest_ms] if ledger.held else [ledger.newest_ms, caught_up_ms.get(noun)]
            known_ms = [ms for ms in times_ms if ms is not None]
            if not known_ms:
                return None
            oldest_ms.append(max(known_ms))
        return min(oldest_ms)
