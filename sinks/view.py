"""The stored rows of a group, put together: records rebuilt from rows, and the way from each to what it was made of.

Everything is found by digest, never by time or position: a group that was scored twice under two pipelines is two chains.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from rollstream.errors import SchemaError
from rollstream.schemas.codec import with_digest
from rollstream.schemas.prompts import Ids, decode_prompts
from rollstream.schemas.records import (
    EnvironmentEvent,
    Group,
    GroupBuilt,
    GroupCredits,
    GroupRewards,
    GroupScores,
    ModelCall,
    Rollout,
    Sample,
)
from rollstream.sinks.rows import CreditRow, RewardRow, RolloutRow, ScoreRow
from rollstream.sinks.stored import Evidence

K = TypeVar("K")
V = TypeVar("V")
Row = TypeVar("Row", ScoreRow, RewardRow, CreditRow)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not hold."""

    check: str
    """Name of the check."""
    about: str
    """Whose: a call, sample, rollout or group."""
    message: str
    """What was found and what was expected."""


class View:
    """One group's rows, by what identifies them.

    Args: evidence: the rows.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.group_id = evidence.group_id
        self.rollouts = {row.digest: row for row in evidence.rollouts}
        self.groups = {group.digest: group for group in evidence.groups}
        self.scores: dict[str, list[ScoreRow]] = _by((row.scores_digest, row) for row in evidence.scores)
        self.rewards: dict[str, list[RewardRow]] = _by((row.rewards_digest, row) for row in evidence.rewards)
        self.credits: dict[str, list[CreditRow]] = _by((row.credits_digest, row) for row in evidence.credits)
        self.samples = {sample.sample_id: sample for sample in evidence.samples}
        self.calls: dict[str, list[ModelCall]] = _by((call.call_id, call) for call in evidence.calls)
        self._calls_of: dict[int, list[ModelCall]] = {}  # by identity of the row, which the evidence keeps alive
        self._events: dict[tuple[str, int, str], EnvironmentEvent] = {}
        for event in evidence.events:
            self._events.setdefault((event.rollout_id, event.attempt, event.event_id), event)

    @functools.cached_property
    def prompts(self) -> tuple[dict[str, Ids], dict[str, SchemaError]]:
        """Whole prompts by call id, and why a call has none; deltas are followed within a rollout attempt.

        Of several contents under one id, that which the rollout was made of counts.
        """
        by_rollout = _by(((call.rollout_id, call.attempt), call) for call in self.evidence.calls)
        whole: dict[str, Ids] = {}
        failed: dict[str, SchemaError] = {}
        for key, calls in by_rollout.items():
            rows = [row for row in self.evidence.rollouts if (row.rollout_id, row.attempt) == key]
            found, missing = decode_prompts([*calls, *(call for row in rows for call in self.calls_of(row))])
            whole |= found
            failed |= missing
        return whole, failed

    def samples_of(self, built: GroupBuilt) -> list[Sample]:
        """The samples that a group record names and that are stored."""
        return [self.samples[sample_id] for sample_id in built.sample_ids if sample_id in self.samples]

    def calls_of(self, row: RolloutRow) -> list[ModelCall]:
        """The stored calls of a rollout, in its order, with the delivery that the join saw."""
        known = self._calls_of.get(id(row))
        if known is not None:
            return known
        found = self._calls_of[id(row)] = []
        for ref in row.calls:
            for call in self.calls.get(ref.call_id, ()):
                if (call.call_attempt, call.rollout_id, call.attempt) == (
                    ref.call_attempt,
                    row.rollout_id,
                    row.attempt,
                ):
                    found.append(call if call.delivered is ref.delivered else replace(call, delivered=ref.delivered))
                    break
        return found

    def rebuilt_rollout(self, row: RolloutRow) -> Rollout:
        """The rollout record behind a row, as far as its calls and events are stored, with its digest computed anew."""
        events = [self._events.get((row.rollout_id, row.attempt, event_id)) for event_id in row.event_ids]
        return with_digest(
            Rollout(
                rollout_id=row.rollout_id,
                attempt=row.attempt,
                group_id=row.group_id,
                group_size=row.group_size,
                task_id=row.task_id,
                task=row.task,
                policy=row.policy,
                status=row.status,
                outcome=row.outcome,
                closed_by=row.closed_by,
                calls=tuple(self.calls_of(row)),
                lost_call_ids=row.lost_call_ids,
                events=tuple(event for event in events if event is not None),
                opened_at_ms=row.opened_at_ms,
                closed_at_ms=row.closed_at_ms,
                digest="",
                stage=row.stage,
                pipeline=row.pipeline,
                pipeline_digest=row.pipeline_digest,
                version_min=row.version_min,
                version_max=row.version_max,
            )
        )

    def rebuilt_group(self, group: Group) -> Group:
        """A group with its digest computed anew."""
        return with_digest(group)

    def rebuilt_scores(self, rows: list[ScoreRow]) -> GroupScores | None:
        """The scores record behind its rows; None if its group is not stored. Latencies are outside its digest."""
        first = rows[0]
        group = self.groups.get(first.group_digest)
        if group is None:
            return None
        return with_digest(
            GroupScores(
                group=group,
                scores=tuple(replace(row.score, latency_ms=0) for row in _ordered(rows)),
                digest="",
                stage=first.stage,
                pipeline=first.pipeline,
                pipeline_digest=first.pipeline_digest,
            )
        )

    def rebuilt_rewards(self, rows: list[RewardRow]) -> GroupRewards | None:
        """The rewards record behind its rows; None if its group is not stored."""
        first = rows[0]
        group = self.groups.get(first.group_digest)
        if group is None:
            return None
        return with_digest(
            GroupRewards(
                group=group,
                scores_digest=first.scores_digest,
                rewards=tuple(row.reward for row in _ordered(rows)),
                digest="",
                stage=first.stage,
                pipeline=first.pipeline,
                pipeline_digest=first.pipeline_digest,
            )
        )

    def rebuilt_credits(self, rows: list[CreditRow]) -> GroupCredits | None:
        """The credits record behind its rows; None if its group or its rewards are not stored."""
        first = rows[0]
        group, rewards = self.groups.get(first.group_digest), self.rewards.get(first.rewards_digest)
        if group is None or rewards is None:
            return None
        return with_digest(
            GroupCredits(
                group=group,
                rewards_digest=first.rewards_digest,
                scope=first.scope,
                credits=tuple(row.credit for row in _ordered(rows)),
                rewards=tuple(row.reward for row in _ordered(rewards)),
                statistics=first.statistics,
                digest="",
                stage=first.stage,
                scores_digest=first.scores_digest,
                earlier_stages=first.earlier_stages,
                pipeline=first.pipeline,
                pipeline_digest=first.pipeline_digest,
            )
        )

    def call_of_segment(self, row: RolloutRow, call_id: str, output: bytes) -> ModelCall | None:
        """The call behind a segment: of several attempts the one whose output it holds, else the last."""
        attempts = [call for call in self.calls_of(row) if call.call_id == call_id]
        return next((call for call in attempts if call.output_ids == output), attempts[-1] if attempts else None)


def _by(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)


def _ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.position)
