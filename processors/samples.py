"""The samples of a group: rows with masks, log-probabilities, versions, advantages and weights, and what is in none.

The mask comes from one place: a token has mask 1 if and only if it is in the output of a call of the row. Nothing is padded,
cut or filled: a call that lacks anything is masked as a whole, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollstream.processors.config import BuildConfig, Signature
from rollstream.processors.loss_weights import loss_weight
from rollstream.processors.rows import Row, encoding_digest, lay_out
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import (
    Credit,
    CreditScope,
    CreditStatus,
    GroupBuilt,
    GroupCredits,
    MaskedCall,
    Reward,
    Rollout,
    Sample,
    SampleSegment,
    VersionSpan,
)
from rollstream.schemas.types import pack_floats, pack_ids, pack_mask, unpack_floats

_EXCLUDED = {"aborted": "rollout_aborted", "group_too_small": "group_too_small", "score_missing": "no_reward"}
"""Why a rollout has no reward → why its calls are masked."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A rollout's part of the group."""

    rollout: Rollout
    reward: Reward
    credits: Sequence[Credit]
    rows: list[Row]
    tokens: int
    """N_i."""


def build_group(
    credits: GroupCredits, rollouts: Mapping[str, Rollout], config: BuildConfig, signature: Signature
) -> tuple[list[Sample], GroupBuilt]:
    """The samples of a group, and the record that names them and every masked call.

    Args: rollouts: all members of the group, by digest.
    """
    parts: list[_Part] = []
    masked: list[MaskedCall] = []
    by_rollout: dict[str, list[Credit]] = {}
    for credit in credits.credits:
        by_rollout.setdefault(credit.rollout_id, []).append(credit)
    rewards = {reward.rollout_id: reward for reward in credits.rewards}
    for member in credits.group.members:
        rollout = rollouts[member.rollout_digest]
        reward = rewards.get(rollout.rollout_id, Reward(rollout.rollout_id, (), excluded="score_missing"))
        own = by_rollout.get(rollout.rollout_id, [])
        rows, without_row = lay_out(rollout, config.layout, _masked_by_credit(rollout, reward, own, credits.scope))
        masked += without_row
        parts.append(_Part(rollout, reward, own, rows, sum(_sampled(row) for row in rows)))
    group_tokens = sum(part.tokens for part in parts)
    group_rollouts = sum(part.tokens > 0 for part in parts)
    samples = [
        _sample(part, index, credits, config, signature, group_tokens, group_rollouts)
        for part in parts
        for index in range(len(part.rows))
    ]
    return samples, _built(samples, masked, credits, signature)


def _masked_by_credit(
    rollout: Rollout, reward: Reward, credits: Sequence[Credit], scope: CreditScope
) -> dict[str, str]:
    """Reasons for the calls that credit does not allow to be trained on, by call id."""
    if reward.value is None:
        whole: str | None = _EXCLUDED.get(reward.excluded or "", "no_reward")
    elif not credits:
        whole = "no_reward"
    elif all(credit.status is CreditStatus.NO_BASELINE for credit in credits):
        whole = "no_baseline"
    elif all(credit.status is CreditStatus.EXCLUDED for credit in credits):
        whole = "no_reward"
    else:
        whole = None
    if whole is not None:
        return {call.call_id: whole for call in rollout.calls}
    if scope is CreditScope.ROLLOUT:
        return {}
    allowed = {c.call_id for c in credits if c.status in (CreditStatus.OK, CreditStatus.NO_SPREAD)}
    refused = {c.call_id for c in credits if c.status is CreditStatus.NO_BASELINE}
    return {
        call.call_id: "no_baseline" if call.call_id in refused else "no_reward"
        for call in rollout.calls
        if call.call_id not in allowed
    }


def _sample(
    part: _Part,
    index: int,
    credits: GroupCredits,
    config: BuildConfig,
    signature: Signature,
    group_tokens: int,
    group_rollouts: int,
) -> Sample:
    rollout, row = part.rollout, part.rows[index]
    mask_T = np.zeros(len(row.ids), dtype=np.uint8)
    logprobs_T = np.full(len(row.ids), np.nan, dtype=np.float32)
    advantages_T = np.zeros(len(row.ids), dtype=np.float64)
    versions: list[VersionSpan] = []
    for at in row.calls:
        mask_T[at.start : at.end] = 1
        logprobs_T[at.start : at.end] = unpack_floats(at.call.output_logprobs)
        versions += [VersionSpan(at.start + s.start, at.start + s.end, s.version) for s in at.call.version_spans]
        for credit in part.credits:
            if credit.call_id in (None, at.call.call_id):
                stop = at.end if credit.end is None else min(at.start + credit.end, at.end)
                advantages_T[at.start + (credit.start or 0) : stop] = credit.value
    weight, divisor = loss_weight(config.aggregation, part.tokens, config.constant)
    first = row.calls[0].call
    segments = tuple(SampleSegment(at.call.call_id, at.start, at.end, at.call.prompt.digest) for at in row.calls)
    return Sample(
        sample_id=digest_json(
            "sample",
            rollout.digest,
            credits.digest,
            signature.stage.config_digest,
            [[at.call.call_id, at.call.call_attempt, at.start, at.end, at.call.prompt.digest] for at in row.calls],
        ),
        group_id=credits.group.group_id,
        group_revision=credits.group.revision,
        rollout_id=rollout.rollout_id,
        rollout_attempt=rollout.attempt,
        task_id=rollout.task_id,
        policy=first.policy,
        ids=pack_ids(row.ids),
        mask=pack_mask(mask_T),
        logprobs=pack_floats(logprobs_T),
        advantages=pack_floats(advantages_T),
        versions=tuple(versions),
        segments=segments,
        loss_weight=weight,
        aggregation=config.aggregation,
        divisor=divisor,
        sampled_tokens=_sampled(row),
        rollout_tokens=part.tokens,
        group_tokens=group_tokens,
        group_rollouts=group_rollouts,
        sample_index=index,
        rollout_samples=len(part.rows),
        reward=part.reward.value or 0.0,
        temperature=first.sampling.temperature,
        logprob_semantics=first.logprob_semantics,
        encoding_digest=encoding_digest(first.encoding),
        status=rollout.status,
        version_min=min(span.version for span in versions),
        version_max=max(span.version for span in versions),
        rollout_digest=rollout.digest,
        scores_digest=credits.scores_digest,
        rewards_digest=credits.rewards_digest,
        credits_digest=credits.digest,
        stages=(*credits.earlier_stages, credits.stage, signature.stage),
        created_at_ms=credits.group.closed_at_ms,
        pipeline=signature.pipeline,
        pipeline_digest=signature.pipeline_digest,
    )


def _built(
    samples: Sequence[Sample], masked: Sequence[MaskedCall], credits: GroupCredits, signature: Signature
) -> GroupBuilt:
    values = [reward.value for reward in credits.rewards if reward.value is not None]
    return GroupBuilt(
        group_id=credits.group.group_id,
        group_revision=credits.group.revision,
        task_id=credits.group.task_id,
        sample_ids=tuple(sample.sample_id for sample in samples),
        masked=tuple(masked),
        rollout_ids=tuple(member.rollout_id for member in credits.group.members),
        credits_digest=credits.digest,
        mean_reward=math.fsum(values) / len(values) if values else None,
        has_spread=any(credit.value != 0 for credit in credits.credits),
        created_at_ms=credits.group.closed_at_ms,
        stage=signature.stage,
        pipeline=signature.pipeline,
        pipeline_digest=signature.pipeline_digest,
    )


def _sampled(row: Row) -> int:
    return sum(at.end - at.start for at in row.calls)
