"""Records as Parquet, and back.

Token ids and log-probabilities are byte-split and compressed with zstd, without a dictionary: measured on token data, 11 times
smaller than raw, where the default settings reach 3.6. Rows keep the order of the log.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.schemas.codec import newest_schema, record_name
from rollstream.schemas.records import Record
from rollstream.sinks.columns import arrow_type, field_hints, from_arrow, to_arrow
from rollstream.sinks.decode import Decoded

ROW_GROUP_ROWS = 512


def write_parquet(
    record: type[Record], rows: Sequence[Decoded], logged: Mapping[int, tuple[bytes | None, int]]
) -> bytes:
    """A Parquet file of records of one class, with `_offset`, `_time_ms` and `_key` beside their fields.

    Args: logged: key and timestamp by offset.
    """
    hints = field_hints(record)
    columns = [to_arrow(hint, [getattr(row.record, name) for row in rows]) for name, hint in hints]
    columns += [
        pa.array([row.offset for row in rows], pa.int64()),
        pa.array([logged[row.offset][1] for row in rows], pa.int64()),
        pa.array([logged[row.offset][0] for row in rows], pa.binary()),
    ]
    fields = [pa.field(name, arrow_type(hint)) for name, hint in hints]
    fields += [pa.field("_offset", pa.int64()), pa.field("_time_ms", pa.int64()), pa.field("_key", pa.binary())]
    schema_file = newest_schema(record_name(record))
    metadata = {"rollstream.record": schema_file.record, "rollstream.version": str(schema_file.version)}
    table = pa.table(columns, schema=pa.schema(fields, metadata=metadata))
    leaves = dict(_leaves(table.schema))
    split = [path for path, kind in leaves.items() if kind in (pa.uint32(), pa.float32())]
    out = io.BytesIO()
    pq.write_table(
        table,
        out,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=[path for path in leaves if path not in split],
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
    )
    return out.getvalue()


def read_parquet(record: type[Record], data: bytes) -> list[Record]:
    """The records of a file that `write_parquet` made, in its order."""
    table = pq.read_table(io.BytesIO(data))
    parts = [from_arrow(hint, table.column(name)) for name, hint in field_hints(record)]
    make = cast(Callable[..., Record], record)
    return [make(*values) for values in zip(*parts, strict=True)]


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Parquet's path and type of each leaf column."""

    def walk(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
        if pa.types.is_list(kind):
            yield from walk(f"{path}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for i in range(kind.num_fields):
                yield from walk(f"{path}.{kind.field(i).name}", kind.field(i).type)
        else:
            yield path, kind

    for field in schema:
        yield from walk(field.name, field.type)
