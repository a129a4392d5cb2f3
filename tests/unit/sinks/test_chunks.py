"""Chunks: aligned, cut by age with their exact range, each offset once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollstream.schemas.codec import Codec
from rollstream.schemas.records import CallStarted
from rollstream.sinks.base import Chunk, LogRecord, Source
from rollstream.sinks.chunks import Chunker
from rollstream.sinks.memory import MemorySink
from tests.memory_claims import MemoryClaims
from tests.unit.schemas.calls import a_call

SOURCE = Source("t.calls.v1", 0)


def _record(offset: int) -> LogRecord:
    return LogRecord(offset, b"x" * 10)


def _ranges(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.first, chunk.last) for chunk in chunks]


def test_chunk_ends_at_the_next_multiple_wherever_reading_starts() -> None:
    """A reader that starts at offset 7 cuts at 10, like every other one."""
    chunker = Chunker(chunk_records=5, max_age_s=60)
    chunker.start(SOURCE, 7)

    chunks = [chunk for offset in range(7, 20) for chunk in chunker.add(SOURCE, _record(offset), now_s=0)]

    assert [(7, 9), (10, 14), (15, 19)] == _ranges(chunks)
    assert all(chunk.is_full for chunk in chunks)


def test_tail_is_cut_with_its_exact_range_when_it_has_waited() -> None:
    """What is not full is written after max_age_s, and the next chunk still ends at the multiple."""
    chunker = Chunker(chunk_records=5, max_age_s=2)
    chunker.add(SOURCE, _record(0), now_s=100.0)
    chunker.add(SOURCE, _record(1), now_s=101.5)

    too_early = chunker.due(now_s=101.9)
    tail = chunker.due(now_s=102.0)
    rest = [chunk for offset in (2, 3, 4) for chunk in chunker.add(SOURCE, _record(offset), now_s=103)]

    assert [] == too_early
    assert [(0, 1)] == _ranges(tail)
    assert [(2, 4)] == _ranges(rest)


def test_all_partitions_are_cut_when_one_is_due() -> None:
    """The store gets one batch, not one a partition."""
    chunker = Chunker(chunk_records=5, max_age_s=2)
    other = Source("t.calls.v1", 1)
    chunker.add(SOURCE, _record(0), now_s=0)
    chunker.add(other, _record(0), now_s=1.9)

    chunks = chunker.due(now_s=2)

    assert {SOURCE, other} == {chunk.source for chunk in chunks}


def test_gap_in_the_log_ends_the_chunk_that_it_reaches_over() -> None:
    """Compaction leaves gaps; a chunk never holds offsets of two multiples."""
    chunker = Chunker(chunk_records=5, max_age_s=60)

    chunks = [chunk for offset in (1, 3, 12, 14) for chunk in chunker.add(SOURCE, _record(offset), now_s=0)]

    assert [(1, 3), (12, 14)] == _ranges(chunks)


def test_chunk_is_cut_by_size() -> None:
    """A chunk of large records is written before it fills the memory."""
    chunker = Chunker(chunk_records=100, max_age_s=60, max_bytes=25)

    chunks = [chunk for offset in range(4) for chunk in chunker.add(SOURCE, _record(offset), now_s=0)]

    assert [(0, 2)] == _ranges(chunks)
    assert chunker.size_bytes == 10


def test_chunk_of_references_is_cut_by_the_size_of_what_they_name() -> None:
    """A claim check is small, and its content is in memory when the chunk is written."""
    codec = Codec(claims=MemoryClaims(), inline_bytes=1_000)
    values = [codec.encode(a_call(f"c-{n}", output=range(1_000))) for n in range(4)]
    content = codec.claimed_bytes(values[0])
    chunker = Chunker(chunk_records=100, max_age_s=60, max_bytes=3 * content, claimed_bytes=codec.claimed_bytes)

    chunks = [c for at, value in enumerate(values) for c in chunker.add(SOURCE, LogRecord(at, value), now_s=0)]

    assert content > 8_000 > len(values[0])
    assert 0 == codec.claimed_bytes(codec.encode(a_call("small")))
    assert [(0, 2)] == _ranges(chunks)
    assert chunker.size_bytes == len(values[3]) + content


def test_offset_that_was_taken_is_ignored() -> None:
    """A consumer may hand out a record again after a seek."""
    chunker = Chunker(chunk_records=4, max_age_s=60)

    chunks = [chunk for offset in (0, 1, 1, 0, 2, 3, 3) for chunk in chunker.add(SOURCE, _record(offset), now_s=0)]

    assert [(0, 3)] == _ranges(chunks)
    assert [0, 1, 2, 3] == [record.offset for record in chunks[0].records]


@given(
    count=st.integers(1, 60),
    size=st.integers(1, 17),
    events=st.lists(st.sampled_from(["read", "read", "read", "age", "crash", "crash_after_write"]), max_size=120),
)
def test_rows_are_each_offset_once_whatever_the_cuts_and_replays(count: int, size: int, events: list[str]) -> None:
    """Ages, crashes before and after the write: the sink holds exactly what the log holds."""
    codec = Codec()
    values = [codec.encode(CallStarted(f"c{i}", "r", 0, "g", i, 1, "d", "q", i)) for i in range(count)]
    sink = MemorySink()
    chunker = Chunker(size, max_age_s=5)
    now_s = 0.0

    def restart() -> int:
        chunker.start(SOURCE, sink.positions().get(SOURCE, 0))
        return sink.positions().get(SOURCE, 0)

    at = restart()
    for event in [*events, *["read"] * (2 * count + len(events))]:
        now_s += 1
        if event == "read" and at < count:
            chunks = chunker.add(SOURCE, LogRecord(at, values[at]), now_s)
            at += 1
        elif event == "age":
            now_s += 5
            chunks = chunker.due(now_s)
        elif event == "crash_after_write":
            sink.write(chunker.flush())
            at, chunks = restart(), []
        elif event == "crash":
            at, chunks = restart(), []
        else:
            chunks = []
        sink.write(chunks)
    sink.write(chunker.flush())

    assert list(range(count)) == sorted(sink.records[SOURCE])
    assert [f"c{i}" for i in range(count)] == [record.call_id for record in sink.of(CallStarted)]  # type: ignore[union-attr]
