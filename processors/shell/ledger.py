"""Which events of one topic partition are still held, and up to where its offsets may be committed.

Every stage that reads an event holds it, each under its own bit. The watermark is the offset of the first event that
anybody holds, or one past the last event seen: it moves strictly in order, whatever the order of the releases. Offsets
may have gaps (compaction, transaction markers). Nothing here knows Kafka.
"""

from __future__ import annotations

from collections import deque


class Ledger:
    """The held events of one (topic, partition)."""

    __slots__ = ("_held", "_newest_ms", "_next", "_order")

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        # Offsets in log order with their times; an offset that nobody holds any more is dropped once it comes first.
        self._order: deque[tuple[int, int]] = deque()
        self._next: int | None = None
        self._newest_ms: int | None = None

    @property
    def next_offset(self) -> int | None:
        """The offset that is seen next; None before anything is known."""
        return self._next

    @property
    def watermark(self) -> int | None:
        """The offset to commit: everything below it is finished. None before anything is known."""
        self._drop_finished()
        return self._order[0][0] if self._order else self._next

    @property
    def held(self) -> int:
        """How many events are held."""
        return len(self._held)

    @property
    def oldest_ms(self) -> int | None:
        """Append time of the first held event in log order; None if nothing is held."""
        self._drop_finished()
        return self._order[0][1] if self._order else None

    @property
    def newest_ms(self) -> int | None:
        """Latest append time of all events seen; None before the first."""
        return self._newest_ms

    def see(self, offset: int, holders: int, time_ms: int = 0) -> bool:
        """Count an event as held by the stages whose bits are set in `holders`; none set: it is finished at once.

        Returns: False if the offset was seen before, so that the event must not be given to a stage again.
        """
        if self._next is not None and offset < self._next:
            return False
        self._next = offset + 1
        if self._newest_ms is None or time_ms > self._newest_ms:
            self._newest_ms = time_ms
        if holders:
            self._held[offset] = holders
            self._order.append((offset, time_ms))
        return True

    def hold(self, offset: int, holder: int) -> None:
        """One more holder of an event that is held; nothing for one that is finished."""
        if offset in self._held:
            self._held[offset] |= holder

    def release(self, offset: int, holder: int) -> None:
        """One holder lets go; doing it again, or for an event that was never held, changes nothing."""
        left = self._held.get(offset)
        if left is None:
            return
        left &= ~holder
        if left:
            self._held[offset] = left
        else:
            del self._held[offset]

    def advance(self, next_offset: int) -> None:
        """Nothing else stands in the log below `next_offset`: the reader's position has passed it."""
        if self._next is None or next_offset > self._next:
            self._next = next_offset

    def _drop_finished(self) -> None:
        order, held = self._order, self._held
        while order and order[0][0] not in held:
            order.popleft()
