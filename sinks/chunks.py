"""Which offsets are stored together. Pure: no clock, no store, no broker.

A chunk is `[k*C, (k+1)*C)`: aligned, so that a reader that starts again cuts where the first one cut, and the store recognises
the chunk. What has waited too long is cut off earlier, with its exact range; the next chunk still ends at the next
multiple of C. Whatever the cuts, each offset comes out once, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollstream.sinks.base import Chunk, LogRecord, Source


@dataclass(slots=True)
class _Open:
    """What has been read of a partition and not handed out."""

    next_offset: int = 0
    since_s: float = 0.0
    size_bytes: int = 0
    records: list[LogRecord] = field(default_factory=list)


class Chunker:
    """Cuts the records of many partitions into chunks.

    Args:
        chunk_records: C, the number of offsets of a full chunk.
        max_age_s: a chunk is cut when its first record has waited this long.
        max_bytes: a chunk is cut when its values, and what they name in the claim store, reach this size.
        claimed_bytes: how much a value names there.
    """

    def __init__(
        self,
        chunk_records: int,
        max_age_s: float,
        max_bytes: int = 32 << 20,
        *,
        claimed_bytes: Callable[[bytes], int] = lambda value: 0,
    ) -> None:
        self._chunk_records = chunk_records
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._claimed_bytes = claimed_bytes
        self._open: dict[Source, _Open] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes held, and those that are read for them when they are written."""
        return sum(partition.size_bytes for partition in self._open.values())

    def start(self, source: Source, offset: int) -> None:
        """Expect a partition's records from this offset on; what was held of it is forgotten."""
        self._open[source] = _Open(next_offset=offset)

    def next_offset(self, source: Source) -> int:
        """The offset that a partition's next record is expected at, or comes after."""
        return self._open[source].next_offset if source in self._open else 0

    def skip(self, source: Source, offset: int) -> None:
        """Expect a partition's next record at this offset; what is held of it stays."""
        self._open[source].next_offset = offset

    def drop(self, sources: Iterable[Source]) -> None:
        """Forget partitions that went to somebody else."""
        for source in sources:
            self._open.pop(source, None)

    def add(self, source: Source, record: LogRecord, now_s: float) -> list[Chunk]:
        """Take the next record of a partition.

        A record whose offset was taken before is ignored. Returns: the chunks that this completes.
        """
        held = self._open.setdefault(source, _Open())
        if record.offset < held.next_offset:
            return []
        done: list[Chunk] = []
        if held.records and record.offset // self._chunk_records > held.records[0].offset // self._chunk_records:
            done.append(self._cut(source, held, is_full=True))  # the log has a gap where this chunk should have ended
        if not held.records:
            held.since_s = now_s
        held.records.append(record)
        held.size_bytes += len(record.value) + self._claimed_bytes(record.value)
        held.next_offset = record.offset + 1
        if held.next_offset % self._chunk_records == 0:
            done.append(self._cut(source, held, is_full=True))
        elif held.size_bytes >= self._max_bytes:
            done.append(self._cut(source, held, is_full=False))
        return done

    def due(self, now_s: float) -> list[Chunk]:
        """Cut what has waited too long.

        As soon as one partition is due, all are cut: the store then takes one batch and not one a partition.
        """
        if any(held.records and now_s - held.since_s >= self._max_age_s for held in self._open.values()):
            return self.flush()
        return []

    def flush(self) -> list[Chunk]:
        """Cut everything."""
        return [self._cut(source, held, is_full=False) for source, held in self._open.items() if held.records]

    def _cut(self, source: Source, held: _Open, *, is_full: bool) -> Chunk:
        records = tuple(held.records)
        held.records, held.size_bytes = [], 0
        return Chunk(source, records[0].offset, records[-1].offset, records, is_full)
