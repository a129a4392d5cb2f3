"""Offsets that are stored and that Kafka shall show.

Where a sink goes on is written in its store; what it commits to Kafka only shows tools how far it is. A commit that was on its
way while the group's coordinator moved is lost, and without new records nobody would make another: it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollstream.sinks.base import Chunk

_AGAIN_S = 5.0

Place = tuple[str, int]
"""Topic and partition."""


class Commits:
    """What is committed, and what has to be. Used from the consumer's thread, which also brings the broker's answers."""

    def __init__(self) -> None:
        self._open: dict[Place, int] = {}
        self._again_at_s = 0.0

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that were stored."""
        for chunk in chunks:
            self._open[chunk.source.topic, chunk.source.partition] = chunk.last + 1
        self._again_at_s = 0.0

    def forget(self, places: Iterable[Place]) -> None:
        """Partitions that are another's now."""
        for place in places:
            self._open.pop(place, None)

    def due(self, now_s: float) -> dict[Place, int]:
        """Next offsets to commit now: at once after `add`, later those that were not answered. Args: now_s: monotonic clock."""
        if not self._open or now_s < self._again_at_s:
            return {}
        self._again_at_s = now_s + _AGAIN_S
        return dict(self._open)

    def answered(self, error: Any, partitions: Sequence[Any]) -> None:
        """librdkafka's `on_commit`: what the broker said about offsets."""
        for partition in partitions:
            place = (partition.topic, partition.partition)
            if error is None and partition.error is None and self._open.get(place) == partition.offset:
                del self._open[place]
