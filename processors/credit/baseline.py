"""Advantages against a baseline from the same group: center, then scale. GRPO, Dr.GRPO and RLOO are settings of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rollstream.processors.credit.base import SPREAD, CreditResult
from rollstream.schemas.records import Credit, CreditScope, CreditStatistics, CreditStatus, Reward

Center = Literal["mean", "loo"]
"""`mean` of the group, or of all others (leave one out)."""
Scale = Literal["group_std", "loo_std", "none"]
"""Divide by the standard deviation of the group, of all others, or not at all."""
Singleton = Literal["no_baseline", "reward"]
"""A lone reward has no advantage and is not trained on, or is its own advantage (baseline 0, deviation 1, as in verl)."""


def against_group(
    rewards: Sequence[Reward], *, center: Center, scale: Scale, ddof: int, eps: float, singleton: Singleton
) -> CreditResult:
    """Advantage of each rollout against its group.

    Args:
        rewards: one a member; those without a value are excluded.
        ddof: subtracted from the count in the group's standard deviation; the others' uses 1.
        eps: added to the standard deviation.
    """
    rewards = sorted(rewards, key=lambda reward: reward.rollout_id)
    values_G = [reward.value for reward in rewards if reward.value is not None]
    mean, m2 = mean_and_m2(values_G)
    std = math.sqrt(m2 / (len(values_G) - ddof)) if scale == "group_std" and len(values_G) > ddof else 0.0
    statistics = CreditStatistics(count=len(values_G), mean=mean, std=std, m2=m2)
    status = CreditStatus.OK
    if len(values_G) < 2:
        status = CreditStatus.OK if singleton == "reward" else CreditStatus.NO_BASELINE
        advantages_G = [value / (1.0 + eps) if scale != "none" else value for value in values_G]
    elif max(values_G) - min(values_G) <= SPREAD:
        status = CreditStatus.NO_SPREAD
        advantages_G = [0.0] * len(values_G)
    else:
        advantages_G = [
            _scaled(_centered(values_G, at, mean, center), values_G, at, scale, std, eps)
            for at in range(len(values_G))
        ]
    remaining = iter(advantages_G)
    credits = tuple(
        Credit(reward.rollout_id, CreditStatus.EXCLUDED, 0.0)
        if reward.value is None
        else Credit(reward.rollout_id, status, next(remaining) if status is CreditStatus.OK else 0.0)
        for reward in rewards
    )
    return CreditResult(CreditScope.ROLLOUT, credits, statistics)


def mean_and_m2(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and sum of squared deviations from it; 0 and 0 of nothing."""
    if not values:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values)


def _centered(values_G: Sequence[float], at: int, mean: float, center: Center) -> float:
    if center == "mean":
        return values_G[at] - mean
    n = len(values_G)
    return (values_G[at] - mean) * n / (n - 1)


def _scaled(centered: float, values_G: Sequence[float], at: int, scale: Scale, std: float, eps: float) -> float:
    if scale == "none":
        return centered
    if scale == "group_std":
        return centered / (std + eps)
    others = [value for i, value in enumerate(values_G) if i != at]
    if max(others) - min(others) <= SPREAD:  # also with one other: nothing to divide by
        return centered
    _, m2 = mean_and_m2(others)
    return centered / (math.sqrt(m2 / (len(others) - 1)) + eps)
