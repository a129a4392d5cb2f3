"""Stored rows back as records: what `audit` and `explain` look at.

Everything of a group is loaded together, and as many groups as fit a number of bytes; dead letters come one after the other. So
an audit of any size needs the memory of a few groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstream.errors import AuditError, boundary
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    DeadLetter,
    EnvironmentEvent,
    Group,
    GroupBuilt,
    ModelCall,
    RolloutOpened,
    Sample,
    Terminal,
)
from rollstream.sinks.rows import CreditRow, RewardRow, RolloutRow, ScoreRow
from rollstream.sinks.tables import TABLES, columns_of, from_table

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

BATCH_BYTES = 32 << 20
"""How much of the store is loaded at once, by rows and tokens; in memory it is about ten times as much."""
_ROW_BYTES = 1_000
_TOKENS = {"model_calls": "length(prompt_suffix) + length(output_ids)", "samples": "length(ids)"}
_TOKEN_BYTES = 16
_LETTERS_AT_ONCE = 10_000
_LETTER_KEY = "(topic, partition, offset, boundary, dead_letter_id)"


@dataclass(slots=True)
class Evidence:
    """Every stored row of one group, in the order of the log."""

    group_id: str
    """The group."""
    openings: list[RolloutOpened] = field(default_factory=list)
    """Openings of its rollouts."""
    starts: list[CallStarted] = field(default_factory=list)
    """Intents of its calls."""
    calls: list[ModelCall] = field(default_factory=list)
    """Outcomes of its calls."""
    deliveries: list[CallDelivery] = field(default_factory=list)
    """Corrections of deliveries."""
    events: list[EnvironmentEvent] = field(default_factory=list)
    """Environment events."""
    terminals: list[Terminal] = field(default_factory=list)
    """Ends of its rollouts."""
    rollouts: list[RolloutRow] = field(default_factory=list)
    """Its rollouts."""
    groups: list[Group] = field(default_factory=list)
    """The group's closings."""
    scores: list[ScoreRow] = field(default_factory=list)
    """Raw scores."""
    rewards: list[RewardRow] = field(default_factory=list)
    """Rewards."""
    credits: list[CreditRow] = field(default_factory=list)
    """Credits."""
    samples: list[Sample] = field(default_factory=list)
    """Samples."""
    built: list[GroupBuilt] = field(default_factory=list)
    """What build said when all samples were written."""


PARTS: Mapping[str, str] = {
    "rollout_openings": "openings",
    "call_starts": "starts",
    "model_calls": "calls",
    "call_deliveries": "deliveries",
    "environment_events": "events",
    "terminals": "terminals",
    "rollouts": "rollouts",
    "groups": "groups",
    "scores": "scores",
    "rewards": "rewards",
    "credits": "credits",
    "samples": "samples",
    "built_groups": "built",
}
"""Table → the field of `Evidence` that holds its rows."""


class Stored:
    """Reads the tables of one database. Every query says FINAL: rows that were stored twice count once.

    Args: client: from `connect`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def group_ids(self) -> list[str]:
        """Every group that any table knows, sorted."""
        union = " UNION DISTINCT ".join(f"SELECT group_id FROM {name}" for name in PARTS)
        return [row[0] for row in self.query(f"SELECT group_id FROM ({union}) ORDER BY group_id")]

    def load(self, group_ids: Sequence[str]) -> list[Evidence]:
        """All rows of some groups."""
        found = {group_id: Evidence(group_id) for group_id in group_ids}
        if not found:
            return []
        where = "group_id BETWEEN {first:String} AND {last:String} AND group_id IN {ids:Array(String)}"
        parameters = {"first": min(group_ids), "last": max(group_ids), "ids": list(group_ids)}
        for name, part in PARTS.items():
            for row in self.rows(name, where, parameters):
                getattr(found[row.group_id], part).append(row)
        return list(found.values())

    def batches(self) -> Iterator[list[Evidence]]:
        """All groups, as many at a time as `BATCH_BYTES` allow, and at least one."""
        costs = " UNION ALL ".join(
            f"SELECT group_id, {_ROW_BYTES} + {_TOKEN_BYTES} * ({_TOKENS.get(name, '0')}) AS cost FROM {name}"
            for name in PARTS
        )
        ids: list[str] = []
        held_bytes = 0
        for group_id, cost in self.query(
            f"SELECT group_id, sum(cost) FROM ({costs}) GROUP BY group_id ORDER BY group_id"
        ):
            if ids and held_bytes + cost > BATCH_BYTES:
                yield self.load(ids)
                ids, held_bytes = [], 0
            ids.append(group_id)
            held_bytes += cost
        yield self.load(ids)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """All dead letters, by source; no more than `BATCH_BYTES` of them, or one, are in memory."""
        after: Sequence[Any] = ("", -1, -1, "", "")
        while keys := self.query(
            f"SELECT topic, partition, offset, boundary, dead_letter_id, length(value) FROM dead_letters FINAL "
            f"WHERE {_LETTER_KEY} > {_place('a')} ORDER BY ALL LIMIT {_LETTERS_AT_ONCE}",
            _parameters("a", after),
        ):
            for run in _runs(keys):
                where = f"{_LETTER_KEY} BETWEEN {_place('a')} AND {_place('b')}"
                yield from self.rows("dead_letters", where, _parameters("a", run[0]) | _parameters("b", run[-1]))
            after = keys[-1]

    def rows(self, table: str, where: str, parameters: dict[str, Any]) -> list[Any]:
        """Rows of a table that fulfil a condition, in the order of the log."""
        row = TABLES[table].row
        names = ", ".join(f"`{name}`" for name, _, _ in columns_of(row))
        order = "_topic, _partition, _offset" + (
            ", position" if "position" in names.replace("`", "").split(", ") else ""
        )
        with boundary(
            AuditError, f"read table {table}; is this a store that a sink wrote?", reason="store_unreadable"
        ):
            found = self._client.query_arrow(
                f"SELECT {names} FROM {table} FINAL WHERE {where} ORDER BY {order}",
                parameters=parameters,
                use_strings=False,
            )
            return from_table(row, found)

    def query(self, sql: str, parameters: dict[str, Any] | None = None) -> Sequence[Sequence[Any]]:
        """Plain rows of a query."""
        with boundary(AuditError, "read the store; is this a store that a sink wrote?", reason="store_unreadable"):
            return self._client.query(sql, parameters=parameters).result_rows


_LETTER_TYPES = ("String", "Int64", "Int64", "String", "String")


def _place(name: str) -> str:
    """A key of `dead_letters` in a query."""
    return "(" + ", ".join(f"{{{name}{i}:{kind}}}" for i, kind in enumerate(_LETTER_TYPES)) + ")"


def _parameters(name: str, key: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}{i}": key[i] for i in range(len(_LETTER_TYPES))}


def _runs(keys: Sequence[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    """Keys and sizes, cut so that a run fits `BATCH_BYTES` or is one letter."""
    starts = itertools.accumulate((_ROW_BYTES + key[-1] for key in keys), initial=0)
    for _, run in itertools.groupby(zip(starts, keys, strict=False), lambda pair: pair[0] // BATCH_BYTES):
        yield [key for _, key in run]
