"""Fills a store with records that do not come through a sink's loop: `rollstream rebuild --to-store`.

The store holds them as a sink would have: the same chunks, tables and ledger. What the rebuild made stands under the topic id
`rebuild`, so that a sink that is given the store later does not take the rebuild's offsets for those of its own topic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rollstream.errors import SinkError
from rollstream.sinks.base import Chunk, LogRecord, Sink, SinkBusy, Source
from rollstream.sinks.chunks import Chunker
from rollstream.snapshot import Logged

MADE = "rebuild"
"""The topic id of what was made."""

_BUSY_S = 300.0


class Fill:
    """Writes records to an empty store.

    Args:
        sink: the store.
        chunk_records: records of a chunk.
        topic_ids: the broker's ids of the topics that records are copied from.
        claimed_bytes: as `Chunker` has it.
    Raises: SinkError: the store holds records already.
    """

    wants_inputs = True

    def __init__(
        self,
        sink: Sink,
        chunk_records: int,
        topic_ids: Mapping[str, str],
        *,
        claimed_bytes: Callable[[bytes], int] = lambda value: 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sink = sink
        self._chunker = Chunker(chunk_records, max_age_s=float("inf"), claimed_bytes=claimed_bytes)
        self._topic_ids = topic_ids
        self._clock = clock
        self._sleep = sleep
        if sink.positions():
            raise SinkError(
                "cannot rebuild into this store: it holds records already; name an empty one", reason="target_used"
            )

    def copy(self, record: Logged) -> None:
        """A record as it stands in the log."""
        self._add(record, self._topic_ids.get(record.topic, ""))

    def write(self, record: Logged) -> None:
        """A record that was made."""
        self._add(record, MADE)

    def flush(self) -> None:
        """Store what is held."""
        for chunk in self._chunker.flush():
            self._write(chunk)

    def _add(self, record: Logged, topic_id: str) -> None:
        source = Source(record.topic, record.partition, topic_id)
        row = LogRecord(record.offset, record.value or b"", record.key, record.timestamp)
        for chunk in self._chunker.add(source, row, 0.0):
            self._write(chunk)

    def _write(self, chunk: Chunk) -> None:
        deadline_s = self._clock() + _BUSY_S
        while True:
            try:
                self._sink.write([chunk])
            except SinkBusy as busy:
                if self._clock() > deadline_s:
                    raise
                self._sleep(busy.retry_after_s)
            else:
                return
