"""The ClickHouse tables: which record becomes rows of which, and what columns a row has.

Columns carry the names of the fields. A record inside a record is flattened with its field's name in front
(`prompt_digest`, `sampling_temperature`, `stage_version`), except the entry that a row is about (`score`, `reward`, `credit`).
The statements are in `ddl/`; a test holds both together.

Every table also has `_topic`, `_partition`, `_offset` (where the record stands), `_time` (its event time) and `_digest` (of its
bytes). The digest is part of the sorting key: the same record stored twice is one row, while two different records under
one identity stay two, for `audit` to find. Not so in `consumptions`: a trainer that repeats a step after a crash writes another
time into the same record, and the step counts once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    Consumption,
    DeadLetter,
    EnvironmentEvent,
    Group,
    GroupBuilt,
    GroupCredits,
    GroupRewards,
    GroupScores,
    ModelCall,
    PolicyVersion,
    Record,
    Rollout,
    RolloutOpened,
    Sample,
    Terminal,
)
from rollstream.sinks.base import Source
from rollstream.sinks.columns import arrow_type, field_hints, from_arrow, to_arrow
from rollstream.sinks.decode import Decoded
from rollstream.sinks.rows import (
    CreditRow,
    RewardRow,
    RolloutRow,
    ScoreRow,
    credit_rows,
    reward_rows,
    rollout_rows,
    score_rows,
)

_TIME_RANGE_MS = (-2_208_988_800_000, 10_413_791_999_999)  # what DateTime64 can hold: the years 1900 to 2299
_UNPREFIXED = {"score", "reward", "credit"}


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    name: str
    """Its name."""
    row: type
    """Class of its rows."""
    record: type[Record]
    """The record that they come from."""
    rows: Callable[[Any], Iterable[Any]] = lambda record: (record,)
    """Rows of a record."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A row with where it comes from."""

    row: Any
    """The row."""
    source: Source
    """Topic partition."""
    decoded: Decoded
    """The record that it was made from."""


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table("rollout_openings", RolloutOpened, RolloutOpened),
        Table("call_starts", CallStarted, CallStarted),
        Table("model_calls", ModelCall, ModelCall),
        Table("call_deliveries", CallDelivery, CallDelivery),
        Table("environment_events", EnvironmentEvent, EnvironmentEvent),
        Table("terminals", Terminal, Terminal),
        Table("rollouts", RolloutRow, Rollout, rollout_rows),
        Table("groups", Group, Group),
        Table("scores", ScoreRow, GroupScores, score_rows),
        Table("rewards", RewardRow, GroupRewards, reward_rows),
        Table("credits", CreditRow, GroupCredits, credit_rows),
        Table("samples", Sample, Sample),
        Table("built_groups", GroupBuilt, GroupBuilt),
        Table("policy_versions", PolicyVersion, PolicyVersion),
        Table("consumptions", Consumption, Consumption),
        Table("dead_letters", DeadLetter, DeadLetter),
    )
}
_BY_RECORD = {table.record: table for table in TABLES.values()}


def table_of(record: type[Record]) -> Table:
    """The table that a record's rows go to."""
    return _BY_RECORD[record]


def is_stored(record: Record, topic: str) -> bool:
    """Whether a record of a topic gets rows: a terminal stands in three topics and is stored from `terminals` alone."""
    return not isinstance(record, Terminal) or topic.split(".")[-2:-1] == ["terminals"]


@functools.cache
def columns_of(row: type) -> tuple[tuple[str, Any, str], ...]:
    """Columns of a row class: name, field type, and the path of attributes that leads to the value."""
    found: list[tuple[str, Any, str]] = []
    for name, hint in field_hints(row):
        if dataclasses.is_dataclass(hint):
            prefix = "" if name in _UNPREFIXED else f"{name}_"
            found += [
                (prefix + inner, kind, f"{name}.{path}") for inner, kind, path in columns_of(typing.cast(type, hint))
            ]
        else:
            found.append((name, hint, name))
    return tuple(found)


META: tuple[tuple[str, Any], ...] = (
    ("_topic", pa.string()),
    ("_partition", pa.int32()),
    ("_offset", pa.int64()),
    ("_time", pa.timestamp("ms", tz="UTC")),
    ("_digest", pa.string()),
)


def table_schema(table: Table) -> pa.Schema:
    """Arrow schema of a table's rows."""
    fields = [pa.field(name, arrow_type(kind)) for name, kind, _ in columns_of(table.row)]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in META)])


def to_table(table: Table, rows: Sequence[Placed]) -> pa.Table:
    """Rows as an Arrow table."""
    columns = [to_arrow(kind, [get(placed.row) for placed in rows]) for kind, get in _getters(table.row)]
    low, high = _TIME_RANGE_MS
    times = [min(max(event_time_ms(placed.decoded.record), low), high) for placed in rows]
    columns += [
        pa.array([placed.source.topic for placed in rows], pa.string()),
        pa.array([placed.source.partition for placed in rows], pa.int32()),
        pa.array([placed.decoded.offset for placed in rows], pa.int64()),
        pa.array(times, pa.int64()).cast(pa.timestamp("ms", tz="UTC")),
        pa.array([placed.decoded.digest for placed in rows], pa.string()),
    ]
    return pa.table(columns, schema=table_schema(table))


def from_table(row: type, table: pa.Table, prefix: str = "") -> list[Any]:
    """The rows behind an Arrow table, as `to_table` got them."""
    parts: list[list[Any]] = []
    for name, hint in field_hints(row):
        if dataclasses.is_dataclass(hint):
            inner = "" if name in _UNPREFIXED else f"{name}_"
            parts.append(from_table(typing.cast(type, hint), table, prefix + inner))
        else:
            parts.append(from_arrow(hint, table.column(prefix + name)))
    return [row(*values) for values in zip(*parts, strict=True)]


@functools.cache
def _getters(row: type) -> tuple[tuple[Any, Callable[[Any], Any]], ...]:
    return tuple((kind, operator.attrgetter(path)) for _, kind, path in columns_of(row))
