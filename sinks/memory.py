"""A sink in memory, for tests and small tools: decoded records by topic, each offset once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollstream.schemas.codec import Codec
from rollstream.schemas.records import Record
from rollstream.sinks.base import Chunk, Source
from rollstream.sinks.decode import decode_chunk


class MemorySink:
    """Keeps everything it is given."""

    def __init__(self, codec: Codec | None = None) -> None:
        self._codec = codec or Codec()
        self._positions: dict[Source, int] = {}
        self.records: dict[Source, dict[int, Record]] = {}

    def positions(self) -> Mapping[Source, int]:
        """The offset each partition goes on at."""
        return dict(self._positions)

    def write(self, chunks: Sequence[Chunk]) -> int:
        """Keep the records of the chunks. Returns: how many are new."""
        new = 0
        for chunk in chunks:
            kept = self.records.setdefault(chunk.source, {})
            for row in decode_chunk(chunk, self._codec):
                new += row.offset not in kept
                kept[row.offset] = row.record
            self._positions[chunk.source] = max(self._positions.get(chunk.source, 0), chunk.last + 1)
        return new

    def of(self, kind: type[Record]) -> list[Record]:
        """All records of a class."""
        return [
            record for kept in self.records.values() for _, record in sorted(kept.items()) if type(record) is kind
        ]

    def close(self) -> None:
        """Nothing to let go of."""
