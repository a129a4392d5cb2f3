"""Small samples and groups."""

from __future__ import annotations

import math

from rollstream.schemas.records import (
    Aggregation,
    Divisor,
    GroupBuilt,
    LogprobSemantics,
    RolloutStatus,
    Sample,
    SampleSegment,
    StageRef,
    VersionSpan,
)
from rollstream.schemas.types import pack_floats, pack_ids, pack_mask

STAGE = StageRef("build", "merge", 1, "cfg")


def make_sample(
    sample_id: str,
    *,
    group_id: str = "g",
    rollout_id: str = "r",
    prompt: int = 3,
    output: int = 2,
    version: int = 5,
    policy: str = "default",
    weight: float = 0.5,
    divisor: Divisor = Divisor.ROLLOUTS,
    advantage: float = 1.0,
    pipeline_digest: str = "p",
) -> Sample:
    """A sample of one call: `prompt` context tokens, then `output` sampled ones."""
    length = prompt + output
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        group_revision=0,
        rollout_id=rollout_id,
        rollout_attempt=0,
        task_id="t",
        policy=policy,
        ids=pack_ids(list(range(10, 10 + length))),
        mask=pack_mask([0] * prompt + [1] * output),
        logprobs=pack_floats([math.nan] * prompt + [-0.5] * output),
        advantages=pack_floats([0.0] * prompt + [advantage] * output),
        versions=(VersionSpan(prompt, length, version),),
        segments=(SampleSegment(f"{sample_id}-c", prompt, length, "d"),),
        loss_weight=weight,
        aggregation=Aggregation.ROLLOUT_MEAN,
        divisor=divisor,
        sampled_tokens=output,
        rollout_tokens=output,
        group_tokens=output,
        group_rollouts=1,
        sample_index=0,
        rollout_samples=1,
        reward=1.0,
        temperature=1.0,
        logprob_semantics=LogprobSemantics.PROCESSED,
        encoding_digest="e",
        status=RolloutStatus.SUCCEEDED,
        version_min=version,
        version_max=version,
        rollout_digest="rd",
        scores_digest="sd",
        rewards_digest="wd",
        credits_digest="cd",
        stages=(STAGE,),
        created_at_ms=1,
        pipeline="default",
        pipeline_digest=pipeline_digest,
    )


def make_built(
    group_id: str, sample_ids: tuple[str, ...], *, has_spread: bool = True, pipeline_digest: str = "p"
) -> GroupBuilt:
    """The record that ends a group."""
    return GroupBuilt(
        group_id=group_id,
        group_revision=0,
        task_id="t",
        sample_ids=sample_ids,
        masked=(),
        rollout_ids=("r",),
        credits_digest="cd",
        mean_reward=0.5,
        has_spread=has_spread,
        created_at_ms=1,
        stage=STAGE,
        pipeline="default",
        pipeline_digest=pipeline_digest,
    )


def make_group(group_id: str, count: int = 2, **fields: object) -> list[Sample | GroupBuilt]:
    """Samples, then the record that names them."""
    has_spread = bool(fields.pop("has_spread", True))
    samples = [
        make_sample(f"{group_id}-{i}", group_id=group_id, rollout_id=f"{group_id}-r{i}", **fields)  # type: ignore[arg-type]
        for i in range(count)
    ]
    return [*samples, make_built(group_id, tuple(s.sample_id for s in samples), has_spread=has_spread)]
