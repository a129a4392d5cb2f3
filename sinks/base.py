"""What a sink is: something that stores chunks of a topic partition, and knows how far it got.

The store owns the positions. A chunk and the note that it is stored may come apart in a crash, so a chunk may be written
twice: every sink makes the second time harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rollstream.errors import SinkError


class Source(NamedTuple):
    """One partition of one incarnation of a topic."""

    topic: str
    """Full topic name."""
    partition: int
    """Partition."""
    topic_id: str = ""
    """The broker's id of the topic: another one means that the topic was deleted and made anew. Empty if unknown."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record as it stands in the log."""

    offset: int
    """Its offset."""
    value: bytes
    """Its bytes."""
    key: bytes | None = None
    """Its key."""
    time_ms: int = 0
    """Its timestamp, UTC epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one partition that are stored together: all that the log holds from `first` to `last`."""

    source: Source
    """Where they come from."""
    first: int
    """Offset of the first one."""
    last: int
    """Offset of the last one."""
    records: tuple[LogRecord, ...]
    """The records, by offset."""
    is_full: bool = False
    """True if it ends where every aligned chunk ends; False if age, size or a stop cut it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return sum(len(record.value) for record in self.records)


class SinkBusy(SinkError):
    """The store cannot take the chunks now. Control flow: the loop pauses, waits and writes the same chunks again."""

    def __init__(self, message: str | None = None, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, reason="sink_busy")
        self.retry_after_s = retry_after_s


class Sink(Protocol):
    """A store of chunks."""

    def positions(self) -> Mapping[Source, int]:
        """The offset each partition goes on at; a partition that is not named goes on at its beginning."""

    def write(self, chunks: Sequence[Chunk]) -> int:
        """Store chunks, and note that they are stored. Doing it twice changes nothing.

        Args: chunks: at most one a source.
        Returns: rows stored.
        Raises: SinkBusy: try again later. SinkError: somebody has to look.
        """

    def close(self) -> None:
        """Let go of the store."""
