"""Reward: the weighted sum of a rollout's scores, clipped; or why there is none.

A reward depends on its own rollout only. What compares rollouts is credit.
"""

from __future__ import annotations

import math

from rollstream.errors import StageError
from rollstream.processors.config import RewardConfig, Signature
from rollstream.processors.stateless import OneToOne
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import (
    GroupClose,
    GroupMember,
    GroupRewards,
    GroupScores,
    Record,
    Reward,
    RewardComponent,
    RolloutStatus,
    Score,
)


class RewardStage(OneToOne):
    """Reward, for one partition."""

    name = "reward"
    inputs: tuple[str, ...] = ("scores",)
    output = "rewards"

    def __init__(self, config: RewardConfig, signature: Signature) -> None:
        super().__init__()
        self._config = config
        self._signature = signature

    def make(self, record: Record) -> GroupRewards:
        if not isinstance(record, GroupScores):
            raise StageError(f"reward cannot use a {type(record).__name__}, expected GroupScores")
        is_partial = record.group.closed_by is GroupClose.PARTIAL
        by_rollout: dict[str, dict[str, Score]] = {}
        for score in record.scores:
            by_rollout.setdefault(score.rollout_id, {})[score.scorer] = score
        rewards = [
            reward(member, by_rollout.get(member.rollout_id, {}), self._config, is_partial=is_partial)
            for member in record.group.members
        ]
        return with_digest(
            GroupRewards(
                group=record.group,
                scores_digest=record.digest,
                rewards=tuple(rewards),
                digest="",
                stage=self._signature.stage,
                pipeline=self._signature.pipeline,
                pipeline_digest=self._signature.pipeline_digest,
            )
        )


def reward(member: GroupMember, scores: dict[str, Score], config: RewardConfig, *, is_partial: bool) -> Reward:
    """The reward of one rollout.

    Args:
        scores: its raw scores by scorer name.
        is_partial: whether its group has too few rollouts.

    Returns: a reward without a value and with a reason if the rollout was aborted, its group is too small, or a score
        that counts is missing.
    """
    components = []
    is_missing = False
    for name, weight in sorted(config.components.items()):
        score = scores.get(name)
        if score is None or score.value is None:
            is_missing = True
        else:
            components.append(RewardComponent(score.score_id, name, score.value, weight, weight * score.value))
    excluded = None
    if member.status is RolloutStatus.ABORTED:
        excluded = "aborted"
    elif is_partial:
        excluded = "group_too_small"
    elif is_missing:
        excluded = "score_missing"
    if excluded is not None:
        return Reward(member.rollout_id, tuple(components), excluded=excluded)
    total = math.fsum(component.value for component in components)
    if config.clip is not None:
        total = min(max(total, config.clip[0]), config.clip[1])
    return Reward(member.rollout_id, tuple(components), value=total)
