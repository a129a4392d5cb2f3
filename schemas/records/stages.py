"""What score, reward and credit write: one record a group and stage, holding the entries of all its rollouts.

Raw scores are never overwritten. Each entry names what it was made from, so every number can be followed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollstream.schemas.records.rollouts import Group, StageRef
from rollstream.schemas.types import Json


@dataclass(frozen=True, slots=True)
class Score:
    """What one scorer said about one rollout, raw."""

    score_id: str
    """Digest of rollout digest, scorer, version and configuration."""
    rollout_id: str
    """The rollout."""
    scorer: str
    """Name in the pipeline file."""
    kind: str
    """Which scorer ran, for instance `exact_match` or `package.module:function`."""
    version: int
    """Its version."""
    config_digest: str
    """Digest of its resolved configuration."""
    value: float | None = None
    """The scalar verdict; None if there is none. A missing score is never 0."""
    verdict: Json | None = None
    """A structured verdict, if the scorer gives one."""
    error: str | None = None
    """Why there is no value: reason code, then text."""
    latency_ms: int = 0
    """How long it took; the only field that differs between two runs."""


@dataclass(frozen=True, slots=True)
class GroupScores:
    """S = Score(G): all raw scores of a group."""

    group: Group
    """The group that was scored."""
    scores: tuple[Score, ...]
    """Sorted by rollout_id, then by scorer as the pipeline names them."""
    digest: str
    """blake2b-128 over what was scored and what was said; latencies do not count."""
    stage: StageRef
    """The score stage."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """One raw score's part in a reward."""

    score_id: str
    """The raw score."""
    scorer: str
    """Its scorer's name."""
    raw: float
    """The raw value."""
    weight: float
    """Its weight."""
    value: float
    """Its contribution, before the total is clipped."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The scalar reward of one rollout."""

    rollout_id: str
    """The rollout."""
    components: tuple[RewardComponent, ...]
    """How it is put together."""
    value: float | None = None
    """The reward; None if the rollout is excluded."""
    excluded: str | None = None
    """Reason code if the rollout has no reward: `score_missing`, `aborted`, `group_too_small`."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Y = Reward(G, S)."""

    group: Group
    """The group."""
    scores_digest: str
    """Digest of the scores used."""
    rewards: tuple[Reward, ...]
    """Sorted by rollout_id."""
    digest: str
    """blake2b-128 over the content above."""
    stage: StageRef
    """The reward stage."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""


class CreditScope(StrEnum):
    """What one credit value applies to."""

    ROLLOUT = "rollout"
    """Every sampled token of the rollout."""
    CALL = "call"
    """Every sampled token of one call."""
    TOKEN = "token"
    """A span of tokens of one call."""


class CreditStatus(StrEnum):
    """Whether a credit may be trained on."""

    OK = "ok"
    """Yes."""
    NO_SPREAD = "no_spread"
    """All rewards of the group are equal: the advantage is exactly 0."""
    NO_BASELINE = "no_baseline"
    """Fewer than two rewards in the group: nothing to compare with."""
    EXCLUDED = "excluded"
    """The rollout has no reward."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantage of one rollout, call or span of tokens."""

    rollout_id: str
    """The rollout."""
    status: CreditStatus
    """Whether it may be trained on."""
    value: float
    """The advantage; 0 unless the status is `ok`."""
    call_id: str | None = None
    """The call, in scopes `call` and `token`."""
    start: int | None = None
    """First output token of the span, in scope `token`."""
    end: int | None = None
    """One past the last output token, in scope `token`."""


@dataclass(frozen=True, slots=True)
class CreditStatistics:
    """What the values were compared with."""

    count: int
    """Rewards that took part."""
    mean: float
    """Their mean."""
    std: float
    """Their standard deviation as the method defines it; 0 where it uses none."""
    m2: float
    """Sum of squared deviations from the mean, to merge groups into a batch (Chan's formula)."""


@dataclass(frozen=True, slots=True)
class GroupCredits:
    """K = Credit(G, Y)."""

    group: Group
    """The group."""
    rewards_digest: str
    """Digest of the rewards used."""
    scope: CreditScope
    """What a value applies to."""
    credits: tuple[Credit, ...]
    """Sorted by rollout_id, then by call order."""
    rewards: tuple[Reward, ...]
    """The rewards, carried along so that a sample can name them."""
    statistics: CreditStatistics
    """What the values were compared with."""
    digest: str
    """blake2b-128 over the content above."""
    stage: StageRef
    """The credit stage."""
    scores_digest: str
    """Digest of the scores below the rewards."""
    earlier_stages: tuple[StageRef, ...]
    """Score and reward stage, in this order."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""
