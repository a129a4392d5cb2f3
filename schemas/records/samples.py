"""What build writes for trainers, and what trainers write back.

Topic `samples` holds the samples of a group, then one `GroupBuilt` that names them all: a reader that has read it has
the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollstream.schemas.records.calls import LogprobSemantics, VersionSpan
from rollstream.schemas.records.environment import RolloutStatus
from rollstream.schemas.records.rollouts import StageRef
from rollstream.schemas.types import PackedFloats, PackedIds, PackedMask


class Aggregation(StrEnum):
    """How token losses add up to the loss of an optimizer step. Source: the table of loss weights in the docs."""

    TOKEN_MEAN = "token_mean"
    """Every trained token counts alike: 1/N."""
    TOKEN_SUM = "token_sum"
    """Sum over trained tokens."""
    ROLLOUT_MEAN = "rollout_mean"
    """Every rollout counts alike, its tokens share: 1/(R N_i)."""
    ROLLOUT_SUM = "rollout_sum"
    """Sum over tokens, mean over rollouts: 1/R."""
    ROLLOUT_SUM_CONSTANT = "rollout_sum_constant"
    """Sum over tokens divided by a constant C, mean over rollouts: 1/(R C). Dr.GRPO's second half."""


class Divisor(StrEnum):
    """What the trainer still divides by, counted over its optimizer step."""

    NONE = "none"
    """Nothing."""
    ROLLOUTS = "rollouts"
    """R, the number of distinct rollouts in the step."""
    TOKENS = "tokens"
    """N, the number of trained tokens in the step."""


@dataclass(frozen=True, slots=True)
class SampleSegment:
    """One call's sampled tokens inside a sample. Their true prefix is everything before them."""

    call_id: str
    """The call."""
    start: int
    """Position in the sample of the call's first sampled token = length of its true prompt."""
    end: int
    """One past the last sampled token."""
    prompt_digest: str
    """Digest of the call's prompt; equals the digest of the sample's first `start` ids."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row for the trainer. All arrays have one item per id, shape [T]."""

    sample_id: str
    """Digest of lineage and build configuration; equal content gives an equal id."""
    group_id: str
    """The group."""
    group_revision: int
    """Its revision."""
    rollout_id: str
    """The rollout."""
    rollout_attempt: int
    """Its attempt."""
    task_id: str
    """Name of the task."""
    policy: str
    """Name of the policy."""
    ids: PackedIds
    """Token ids, [T]."""
    mask: PackedMask
    """1 where the policy sampled the token, [T]."""
    logprobs: PackedFloats
    """Rollout log-probability of each sampled token, NaN where mask is 0, [T]."""
    advantages: PackedFloats
    """Advantage of each sampled token, 0 where mask is 0, [T]."""
    versions: tuple[VersionSpan, ...]
    """Policy version of each sampled token, as spans over positions of this sample; every sampled token is covered."""
    segments: tuple[SampleSegment, ...]
    """Which call sampled which tokens, in order."""
    loss_weight: float
    """Weight of each sampled token's loss, before `divisor` is applied."""
    aggregation: Aggregation
    """The aggregation that the weight stands for."""
    divisor: Divisor
    """What the trainer still divides by."""
    sampled_tokens: int
    """Number of ones in `mask` (n_s)."""
    rollout_tokens: int
    """Sampled tokens over all samples of the rollout (N_i)."""
    group_tokens: int
    """Sampled tokens over all samples of the group (N_g)."""
    group_rollouts: int
    """Rollouts of the group that have samples (n_g)."""
    sample_index: int
    """Index of this sample within its rollout, from 0."""
    rollout_samples: int
    """Samples of the rollout."""
    reward: float
    """The rollout's reward."""
    temperature: float
    """Sampling temperature of the calls."""
    logprob_semantics: LogprobSemantics
    """Which distribution `logprobs` belong to."""
    encoding_digest: str
    """Digest of the encoding; calls of different encodings never share a sample."""
    status: RolloutStatus
    """How the rollout ended."""
    version_min: int
    """Oldest policy version in the sample."""
    version_max: int
    """Newest policy version in the sample."""
    rollout_digest: str
    """Digest of the rollout."""
    scores_digest: str
    """Digest of the group's scores."""
    rewards_digest: str
    """Digest of the group's rewards."""
    credits_digest: str
    """Digest of the group's credits."""
    stages: tuple[StageRef, ...]
    """Score, reward, credit and build, in this order."""
    created_at_ms: int
    """Event time of the group's closing."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""


@dataclass(frozen=True, slots=True)
class MaskedCall:
    """A call that is in no sample, and why."""

    call_id: str
    """The call."""
    rollout_id: str
    """Its rollout."""
    reason: str
    """Reason code."""


@dataclass(frozen=True, slots=True)
class GroupBuilt:
    """All samples of a group are written; every call of the group is in one of them or masked."""

    group_id: str
    """The group."""
    group_revision: int
    """Its revision."""
    task_id: str
    """Name of the task."""
    sample_ids: tuple[str, ...]
    """Its samples, in order."""
    masked: tuple[MaskedCall, ...]
    """Its calls that are in no sample."""
    rollout_ids: tuple[str, ...]
    """All its rollouts, sorted, with or without samples."""
    credits_digest: str
    """Digest of the group's credits."""
    mean_reward: float | None
    """Mean of the rewards; None if there are none."""
    has_spread: bool
    """False if every advantage is 0."""
    created_at_ms: int
    """Event time of the group's closing."""
    stage: StageRef
    """The build stage."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""


@dataclass(frozen=True, slots=True)
class SkippedGroup:
    """A group that the trainer read and did not train on."""

    group_id: str
    """The group."""
    reason: str
    """Reason code: `stale`, `no_spread`, `no_samples`, `other_policy`, `cut`."""


@dataclass(frozen=True, slots=True)
class Consumption:
    """Which samples went into which optimizer step."""

    consumption_id: str
    """Unique."""
    trainer: str
    """Name of the training run."""
    step: int
    """Optimizer step (one batch; several epochs over it count once), from 0."""
    policy: str
    """The policy that was trained."""
    version_before: int
    """Policy version before the step."""
    version_after: int
    """Policy version after it."""
    sample_ids: tuple[str, ...]
    """The samples trained on."""
    group_ids: tuple[str, ...]
    """Their groups."""
    skipped: tuple[SkippedGroup, ...]
    """Groups read and not trained on since the last step."""
    at_ms: int
    """UTC epoch milliseconds."""
    checkpoint: str | None = None
    """Where the weights after the step are."""
