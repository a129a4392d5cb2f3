"""Chunks to ClickHouse tables.

A write is one insert a table, then one into `ingest_ledger`, which is where positions come from. What makes a repeat harmless:

* An insert that is sent again, because its answer was lost, has the same deduplication token: ClickHouse drops it. The
  token binds the rows' content, since an equal token with different rows would silently drop those.
* A crash between rows and ledger means that the chunk is read and written again, perhaps cut differently. Rows with the same
  identity and bytes replace each other (ReplacingMergeTree); queries that must be exact say FINAL.

A materialized view of one's own counts a repeated insert once if its target table has a deduplication window, too
(`non_replicated_deduplication_window`, or a Replicated engine). A chunk that is read again and cut differently is another insert
to it: a view that adds up must read its source with FINAL, or be refreshed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from rollstream.errors import RollstreamError, SinkError
from rollstream.schemas.codec import Codec
from rollstream.sinks.base import Chunk, SinkBusy, Source
from rollstream.sinks.decode import decode_chunk
from rollstream.sinks.tables import TABLES, Placed, is_stored, table_of, to_table

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

FORMAT = 1
"""Part of the deduplication token: counts up when the same bytes become other rows."""

INSERT_SETTINGS = {
    "async_insert": 0,  # on by default since 26.x; we batch ourselves, and tokens need a plain insert
    "insert_deduplicate": 1,
    "deduplicate_blocks_in_dependent_materialized_views": 1,  # or a repeat would double what views have counted
    "max_partitions_per_insert_block": 0,  # old and new records may come in one chunk
}

# Codes of ClickHouse that mean "not now": timeout, too many queries, network, memory, too many parts, read only replica,
# unknown status of insert, no replica is there, keeper.
_BUSY_CODES = {159, 202, 209, 210, 241, 242, 252, 285, 286, 319, 999}
# An answer without a code of ClickHouse comes from what stands before it, or from a server that is going down.
_BUSY_STATUS = re.compile(r"HTTP status (?:408|425|429|5\d\d)\b")


class ClickHouseSink:
    """Writes chunks to the tables of one database.

    Args:
        client: from `connect`.
        codec: decodes the records.
    """

    def __init__(self, client: Client, codec: Codec | None = None) -> None:
        self._client = client
        self._codec = codec or Codec()

    def positions(self) -> Mapping[Source, int]:
        """The offset after the last one in the ledger, for each partition that is in it."""
        with _store("read positions from ingest_ledger"):
            rows = self._client.query(
                "SELECT topic, partition, topic_id, max(last_offset) + 1 FROM ingest_ledger GROUP BY ALL "
                "SETTINGS select_sequential_consistency = 1"
            ).result_rows
        return {Source(topic, partition, topic_id): offset for topic, partition, topic_id, offset in rows}

    def write(self, chunks: Sequence[Chunk]) -> int:
        """Insert the rows of the chunks, then their ledger rows. Returns: rows inserted."""
        if not chunks:
            return 0
        by_table: dict[str, list[Placed]] = {}
        digests = []
        for chunk in chunks:
            content = hashlib.blake2b(digest_size=16)
            for decoded in decode_chunk(chunk, self._codec):
                content.update(decoded.offset.to_bytes(8, "little") + bytes.fromhex(decoded.digest))
                if is_stored(decoded.record, chunk.source.topic):
                    table = table_of(type(decoded.record))
                    for row in table.rows(decoded.record):
                        by_table.setdefault(table.name, []).append(Placed(row, chunk.source, decoded))
            digests.append(content.hexdigest())
        token = chunks_token(chunks, digests)
        for name, rows in by_table.items():
            self._insert(name, to_table(TABLES[name], rows), token)
        self._insert("ingest_ledger", _ledger(chunks, digests), token)
        return sum(len(rows) for rows in by_table.values())

    def close(self) -> None:
        """Close the client; the embedded engine lets go of its folder when the process ends."""
        self._client.close()

    def _insert(self, table: str, rows: pa.Table, token: str) -> None:
        settings = {**INSERT_SETTINGS, "insert_deduplication_token": f"{table}/{token}"}
        with _store(f"insert {rows.num_rows} rows into {table}"):
            self._client.insert_arrow(table, rows, settings=settings)


def chunks_token(chunks: Sequence[Chunk], digests: Sequence[str]) -> str:
    """What binds an insert to topic, partition, range and content of its chunks."""
    if len(chunks) == 1:
        (chunk,) = chunks
        topic, partition, topic_id = chunk.source
        return f"{FORMAT}/{topic}/{topic_id}/{partition}/{chunk.first}-{chunk.last}/{digests[0]}"
    parts = [chunks_token([chunk], [digest]) for chunk, digest in zip(chunks, digests, strict=True)]
    return f"{FORMAT}/{len(parts)}/{hashlib.blake2b(' '.join(sorted(parts)).encode(), digest_size=16).hexdigest()}"


def _ledger(chunks: Sequence[Chunk], digests: Sequence[str]) -> pa.Table:
    return pa.table(
        {
            "topic": pa.array([chunk.source.topic for chunk in chunks], pa.string()),
            "partition": pa.array([chunk.source.partition for chunk in chunks], pa.int32()),
            "topic_id": pa.array([chunk.source.topic_id for chunk in chunks], pa.string()),
            "first_offset": pa.array([chunk.first for chunk in chunks], pa.int64()),
            "last_offset": pa.array([chunk.last for chunk in chunks], pa.int64()),
            "records": pa.array([len(chunk.records) for chunk in chunks], pa.uint32()),
            "digest": pa.array(digests, pa.string()),
        }
    )


@contextmanager
def _store(what: str) -> Iterator[None]:
    """Tell what ClickHouse cannot do now (`SinkBusy`) from what it will never do (`SinkError`)."""
    from clickhouse_connect.driver.exceptions import Error

    try:
        yield
    except RollstreamError:
        raise
    except Error as cause:
        if cause.code in _BUSY_CODES or (cause.code is None and _is_passing(cause)):
            raise SinkBusy(f"cannot {what} now: {cause}") from cause
        raise SinkError(
            f"cannot {what}: {cause}; see whether the tables are those of sinks/ddl (`rollstream` makes them at start)",
            reason="store_refused",
        ) from cause
    except (OSError, pa.ArrowException) as cause:
        if isinstance(cause, pa.ArrowException):
            raise SinkError(f"cannot {what}: {type(cause).__name__}: {cause}", reason="bad_row") from cause
        raise SinkBusy(f"cannot {what} now: {cause}") from cause


def _is_passing(cause: Exception) -> bool:
    from clickhouse_connect.driver.exceptions import OperationalError

    return isinstance(cause, OperationalError) or _BUSY_STATUS.search(str(cause)) is not None
