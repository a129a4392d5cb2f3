"""The rows that records become where a table is not the record itself.

A rollout's row names its calls and events, which have tables of their own; the records of score, reward and credit become one
row an entry, each with what it needs to be put together again: `audit` rebuilds every record and recomputes its digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollstream.schemas.records import (
    ClosedBy,
    Credit,
    CreditScope,
    CreditStatistics,
    Delivery,
    GroupCredits,
    GroupRewards,
    GroupScores,
    Reward,
    Rollout,
    RolloutStatus,
    Score,
    StageRef,
)
from rollstream.schemas.types import Json


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """A call of a rollout, by reference."""

    call_id: str
    """The call."""
    call_attempt: int
    """Its attempt."""
    delivered: Delivery
    """How much of it reached the client, as the join saw it."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout without its calls' tokens and its events' content."""

    rollout_id: str
    """The rollout."""
    attempt: int
    """The attempt that counts."""
    group_id: str
    """Its group."""
    group_size: int
    """How many rollouts the group shall have."""
    task_id: str
    """Name of the task."""
    task: Json
    """The task itself."""
    policy: str
    """Name of the policy that played."""
    status: RolloutStatus
    """How it ended."""
    outcome: Json
    """What the environment says about the result."""
    closed_by: ClosedBy
    """What closed it."""
    calls: tuple[RolloutCall, ...]
    """Its calls, in order."""
    sampled_tokens: int
    """Output tokens of its calls."""
    trainable_tokens: int
    """Output tokens of its trainable calls."""
    lost_call_ids: tuple[str, ...]
    """Calls with an intent and no outcome."""
    event_ids: tuple[str, ...]
    """Its environment events, in log order."""
    opened_at_ms: int
    """UTC epoch milliseconds."""
    closed_at_ms: int
    """UTC epoch milliseconds."""
    digest: str
    """Digest of the rollout record, calls and events included."""
    stage: StageRef
    """The join."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""
    version_min: int | None
    """Oldest policy version that sampled a token."""
    version_max: int | None
    """Newest policy version that sampled a token."""


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One raw score."""

    group_id: str
    """The group."""
    group_revision: int
    """Its revision."""
    task_id: str
    """Name of the task."""
    group_digest: str
    """Digest of the group that was scored."""
    scores_digest: str
    """Digest of all scores of the group."""
    position: int
    """Place among the group's scores."""
    score: Score
    """The score."""
    stage: StageRef
    """The score stage."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""


@dataclass(frozen=True, slots=True)
class RewardRow:
    """The reward of one rollout."""

    group_id: str
    """The group."""
    group_revision: int
    """Its revision."""
    task_id: str
    """Name of the task."""
    group_digest: str
    """Digest of the group."""
    scores_digest: str
    """Digest of the scores used."""
    rewards_digest: str
    """Digest of all rewards of the group."""
    position: int
    """Place among the group's rewards."""
    reward: Reward
    """The reward."""
    stage: StageRef
    """The reward stage."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""


@dataclass(frozen=True, slots=True)
class CreditRow:
    """The advantage of one rollout, call or span of tokens."""

    group_id: str
    """The group."""
    group_revision: int
    """Its revision."""
    task_id: str
    """Name of the task."""
    group_digest: str
    """Digest of the group."""
    scores_digest: str
    """Digest of the scores below the rewards."""
    rewards_digest: str
    """Digest of the rewards used."""
    credits_digest: str
    """Digest of all credits of the group."""
    position: int
    """Place among the group's credits."""
    scope: CreditScope
    """What the value applies to."""
    credit: Credit
    """The credit."""
    statistics: CreditStatistics
    """What the values were compared with."""
    stage: StageRef
    """The credit stage."""
    earlier_stages: tuple[StageRef, ...]
    """Score and reward stage."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""


def rollout_rows(record: Rollout) -> Iterable[RolloutRow]:
    """The row of a rollout."""
    yield RolloutRow(
        rollout_id=record.rollout_id,
        attempt=record.attempt,
        group_id=record.group_id,
        group_size=record.group_size,
        task_id=record.task_id,
        task=record.task,
        policy=record.policy,
        status=record.status,
        outcome=record.outcome,
        closed_by=record.closed_by,
        calls=tuple(RolloutCall(call.call_id, call.call_attempt, call.delivered) for call in record.calls),
        sampled_tokens=sum(len(call.output_ids) // 4 for call in record.calls),
        trainable_tokens=sum(len(call.output_ids) // 4 for call in record.calls if call.trainable),
        lost_call_ids=record.lost_call_ids,
        event_ids=tuple(event.event_id for event in record.events),
        opened_at_ms=record.opened_at_ms,
        closed_at_ms=record.closed_at_ms,
        digest=record.digest,
        stage=record.stage,
        pipeline=record.pipeline,
        pipeline_digest=record.pipeline_digest,
        version_min=record.version_min,
        version_max=record.version_max,
    )


def score_rows(record: GroupScores) -> Iterable[ScoreRow]:
    """One row a score."""
    group = record.group
    for position, score in enumerate(record.scores):
        yield ScoreRow(
            group_id=group.group_id,
            group_revision=group.revision,
            task_id=group.task_id,
            group_digest=group.digest,
            scores_digest=record.digest,
            position=position,
            score=score,
            stage=record.stage,
            pipeline=record.pipeline,
            pipeline_digest=record.pipeline_digest,
        )


def reward_rows(record: GroupRewards) -> Iterable[RewardRow]:
    """One row a rollout."""
    group = record.group
    for position, reward in enumerate(record.rewards):
        yield RewardRow(
            group_id=group.group_id,
            group_revision=group.revision,
            task_id=group.task_id,
            group_digest=group.digest,
            scores_digest=record.scores_digest,
            rewards_digest=record.digest,
            position=position,
            reward=reward,
            stage=record.stage,
            pipeline=record.pipeline,
            pipeline_digest=record.pipeline_digest,
        )


def credit_rows(record: GroupCredits) -> Iterable[CreditRow]:
    """One row a credit."""
    group = record.group
    for position, credit in enumerate(record.credits):
        yield CreditRow(
            group_id=group.group_id,
            group_revision=group.revision,
            task_id=group.task_id,
            group_digest=group.digest,
            scores_digest=record.scores_digest,
            rewards_digest=record.rewards_digest,
            credits_digest=record.digest,
            position=position,
            scope=record.scope,
            credit=credit,
            statistics=record.statistics,
            stage=record.stage,
            earlier_stages=record.earlier_stages,
            pipeline=record.pipeline,
            pipeline_digest=record.pipeline_digest,
        )
