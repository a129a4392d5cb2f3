"""What was read before the thing it belongs to, and may never see it.

Topics are read side by side, so something may be read before what was written first. It waits. A tick says that everything is
read to its end: what it belongs to should be in by then. An orphan that is still one `ORPHAN_AFTER_MS` of tick time after its
first tick is given up.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rollstream.processors.ledger import ORPHAN_AFTER_MS

T = TypeVar("T")


class Orphans(Generic[T]):
    """Things that wait, by the item they belong to."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int | None, T]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, item: str, orphan: T) -> None:
        """Let one wait for its item."""
        self._waiting.setdefault(item, []).append((None, orphan))

    def take(self, item: str) -> list[T]:
        """All that wait for an item, in the order they came; they wait no longer."""
        return [orphan for _, orphan in self._waiting.pop(item, ())]

    def tick(self, now_ms: int) -> list[tuple[str, T]]:
        """Give up those that have been waiting too long. Returns: items and orphans."""
        given_up: list[tuple[str, T]] = []
        for item, waiting in list(self._waiting.items()):
            left: list[tuple[int | None, T]] = []
            for since_ms, orphan in waiting:
                if since_ms is not None and since_ms + ORPHAN_AFTER_MS <= now_ms:
                    given_up.append((item, orphan))
                else:
                    left.append((now_ms if since_ms is None else since_ms, orphan))
            if left:
                self._waiting[item] = left
            else:
                del self._waiting[item]
        return given_up
