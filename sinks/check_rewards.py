"""Check 4: every reward is its raw scores times its weights, every statistic and every advantage follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from rollstream.schemas.records import Credit, CreditScope, CreditStatus, GroupBuilt, Reward, Sample
from rollstream.schemas.types import unpack_floats
from rollstream.sinks.rows import CreditRow, RewardRow
from rollstream.sinks.view import Finding, View

REWARDS = "score_reviewable"

_CLOSE = 1e-9

Bounds = dict[str, tuple[float, float]]
"""Lowest and highest stored reward by the digest of the reward configuration: where clipping may have happened."""


def check_rewards(view: View, bounds: Bounds) -> Iterator[Finding]:
    """Findings over the rewards and credits of the group."""
    for rows in view.rewards.values():
        scores = {row.score.score_id: row.score for row in view.scores.get(rows[0].scores_digest, ())}
        if not scores and any(row.reward.excluded != "aborted" for row in rows):  # aborted rollouts are not scored
            yield _finding(view.group_id, f"its rewards name scores {rows[0].scores_digest}, which are not stored")
            continue
        for row in rows:
            for component in row.reward.components:
                score = scores.get(component.score_id)
                if score is None or (score.rollout_id, score.scorer) != (row.reward.rollout_id, component.scorer):
                    yield _finding(
                        row.reward.rollout_id, f"a component names score {component.score_id!r}, not one of its own"
                    )
                elif score.value != component.raw:
                    yield _finding(
                        row.reward.rollout_id,
                        f"{component.scorer} counts as {component.raw!r}, the raw score is {score.value!r}",
                    )
            for message in _reward(row, bounds):
                yield _finding(row.reward.rollout_id, message)
    for credit_rows in view.credits.values():
        rewards = [row.reward for row in view.rewards.get(credit_rows[0].rewards_digest, ())]
        for message in _credits(credit_rows, rewards):
            yield _finding(view.group_id, message)


def check_advantages(view: View, built: GroupBuilt) -> Iterator[Finding]:
    """Findings over the samples of one built group: advantages are the credits, and the group's summary is right."""
    rows = view.credits.get(built.credits_digest)
    if rows is None:
        return  # the lineage check says so
    samples = view.samples_of(built)
    for sample in samples:
        for message in _advantages(sample, rows):
            yield _finding(sample.sample_id, message)
    values = [
        row.reward.value for row in view.rewards.get(rows[0].rewards_digest, ()) if row.reward.value is not None
    ]
    mean = math.fsum(values) / len(values) if values else None
    if (mean is None) != (built.mean_reward is None) or not _is_close(mean or 0.0, built.mean_reward or 0.0):
        yield _finding(built.group_id, f"mean_reward is {built.mean_reward!r}, its rewards give {mean!r}")
    has_spread = any(unpack_floats(sample.advantages).any() for sample in samples)
    if built.has_spread and not any(row.credit.value for row in rows):
        yield _finding(built.group_id, "has_spread is true, and every advantage is 0")
    if has_spread and not built.has_spread:
        yield _finding(built.group_id, "has_spread is false, and a sample has an advantage")


def _reward(row: RewardRow, bounds: Bounds) -> Iterator[str]:
    reward = row.reward
    if reward.value is None:
        if reward.excluded is None:
            yield "has no reward and no reason"
        return
    if reward.excluded is not None:
        yield f"has a reward, and is excluded as {reward.excluded!r}"
    for component in reward.components:
        if not _is_close(component.value, component.raw * component.weight):
            yield f"{component.scorer}: {component.raw!r} times {component.weight!r} is not {component.value!r}"
    total = math.fsum(component.value for component in reward.components)
    if _is_close(reward.value, total):
        return
    low, high = bounds.get(row.stage.config_digest, (reward.value, reward.value))
    is_clipped = reward.value == (high if total > reward.value else low)
    if not is_clipped:
        yield f"reward is {reward.value!r}, its components give {total!r}, and it is at neither bound of its configuration"


def _credits(rows: list[CreditRow], rewards: list[Reward]) -> Iterator[str]:
    by_rollout = {reward.rollout_id: reward for reward in rewards}
    for credit in (row.credit for row in rows):
        reward = by_rollout.get(credit.rollout_id)
        if reward is None:
            yield f"rollout {credit.rollout_id!r} has a credit and no reward"
        elif (credit.status is CreditStatus.EXCLUDED) != (reward.value is None):
            yield f"rollout {credit.rollout_id!r} has credit status {credit.status.value!r} and reward {reward.value!r}"
        if credit.status is not CreditStatus.OK and credit.value != 0:
            yield f"rollout {credit.rollout_id!r} has advantage {credit.value!r} with status {credit.status.value!r}"
    values = [reward.value for reward in rewards if reward.value is not None]
    told = rows[0].statistics
    if len(values) != told.count:
        yield f"credit statistics count {told.count} rewards, {len(values)} are stored"
    elif values:
        mean = math.fsum(values) / len(values)
        m2 = math.fsum((value - mean) ** 2 for value in values)
        if not _is_close(mean, told.mean) or not _is_close(m2, told.m2):
            yield f"credit statistics say mean {told.mean!r} and m2 {told.m2!r}, the rewards give {mean!r} and {m2!r}"


def _advantages(sample: Sample, rows: list[CreditRow]) -> Iterator[str]:
    mine = [row.credit for row in rows if row.credit.rollout_id == sample.rollout_id]
    found = unpack_floats(sample.advantages)
    for segment in sample.segments:
        expected = _credit_per_token(mine, rows[0].scope, segment.call_id, segment.end - segment.start)
        if expected is None:
            yield f"call {segment.call_id!r} has no credit that may be trained on"
        elif not np.array_equal(found[segment.start : segment.end], expected):
            yield f"advantages of call {segment.call_id!r} are not its credit"


def _credit_per_token(
    credits: Iterable[Credit], scope: CreditScope, call_id: str, length: int
) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    """Advantage of each output token of a call, shape [T]; None if the call has no credit that may be trained on."""
    values = np.zeros(length, dtype=np.float32)
    is_credited = False
    for credit in credits:
        if credit.status not in (CreditStatus.OK, CreditStatus.NO_SPREAD):
            continue
        if scope is CreditScope.ROLLOUT:
            values[:] = credit.value
            is_credited = True
        elif credit.call_id == call_id:
            start = credit.start if scope is CreditScope.TOKEN and credit.start is not None else 0
            end = credit.end if scope is CreditScope.TOKEN and credit.end is not None else length
            values[start:end] = credit.value
            is_credited = True
    return values if is_credited else None


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _finding(about: str, message: str) -> Finding:
    return Finding(REWARDS, about, message)
