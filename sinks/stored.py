"""Stored rows back as records: what `audit` and `explain` look at.

Everything of a group is loaded together, and a group is small; so an audit of any size needs the memory of a few groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

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

T = TypeVar("T")


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


_PARTS: dict[str, str] = {
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


class Stored:
    """Reads the tables of one database. Every query says FINAL: rows that were stored twice count once.

    Args: client: from `connect`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def group_ids(self) -> list[str]:
        """Every group that any table knows, sorted."""
        union = " UNION DISTINCT ".join(f"SELECT group_id FROM {name}" for name in _PARTS)
        return [row[0] for row in self.query(f"SELECT group_id FROM ({union}) ORDER BY group_id")]

    def load(self, group_ids: Sequence[str]) -> list[Evidence]:
        """All rows of some groups."""
        found = {group_id: Evidence(group_id) for group_id in group_ids}
        for name, part in _PARTS.items():
            for row in self.rows(name, "group_id IN {ids:Array(String)}", {"ids": list(group_ids)}):
                getattr(found[row.group_id], part).append(row)
        return list(found.values())

    def batches(self, size: int) -> Iterator[list[Evidence]]:
        """All groups, `size` at a time."""
        ids = self.group_ids()
        for at in range(0, len(ids), size):
            yield self.load(ids[at : at + size])

    def dead_letters(self) -> Iterable[DeadLetter]:
        """All dead letters."""
        return cast("list[DeadLetter]", self.rows("dead_letters", "1", {}))

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
        with boundary(AuditError, "read the store; is this one that a sink wrote?", reason="store_unreadable"):
            return self._client.query(sql, parameters=parameters).result_rows
