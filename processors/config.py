"""The pipeline file as frozen, typed values: every knob of every stage, its default, and what it means.

Names here are the keys of `pipelines/*.yaml`. Who loads and digests them: `pipeline.py`. A new knob gets a default that
leaves the stage's outputs as they were; a new meaning of an old knob counts the stage's `version` up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollstream.schemas.records import Aggregation, RolloutStatus, StageRef


class Part(BaseModel):
    """A part of the pipeline file: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class JoinConfig(Part):
    """Join."""

    version: Literal[1] = 1
    """Version of the code."""
    deadline_s: float = Field(default=600.0, gt=0)
    """A rollout without a terminal is closed this long after its opening, event time."""


class GroupConfig(Part):
    """Group."""

    version: Literal[1] = 1
    """Version of the code."""
    deadline_s: float = Field(default=600.0, gt=0)
    """A group is closed this long after its first rollout closed, event time."""
    min_size: int = Field(default=2, ge=1)
    """With fewer rollouts at the deadline the group is not trained on."""
    counts: Annotated[tuple[RolloutStatus, ...], Field(min_length=1)] = tuple(RolloutStatus)
    """How a rollout must have ended to fill a place; in place of one that does not count, the group waits for another."""
    remember_s: float = Field(default=3600.0, ge=0)
    """A closed group is remembered this long, across restarts; a rollout that comes later than that opens a group anew."""
    late: Literal["dead_letter", "revision"] = "dead_letter"
    """What becomes of a rollout that comes after its group was closed with places free: a dead letter, or a new revision of the
    group that has it as a member, beside the old one."""
    revise_within_s: float = Field(default=600.0, gt=0)
    """With `late: revision`, a rollout makes a revision if it closed up to this long after its group, event time; a group's
    rollouts are kept by score and build for as long."""

    @property
    def retain_ms(self) -> int:
        """How long after its closing a group may be revised; 0: never."""
        return round(self.revise_within_s * 1000) if self.late == "revision" else 0

    @field_validator("counts")
    @classmethod
    def _counts_in_order(cls, counts: tuple[RolloutStatus, ...]) -> tuple[RolloutStatus, ...]:
        """In whichever order they are written, they mean the same and have one digest."""
        return tuple(status for status in RolloutStatus if status in counts)

    @model_validator(mode="after")
    def _remembers_what_it_revises(self) -> Self:
        if self.late == "revision" and self.revise_within_s > self.remember_s:
            raise ValueError(
                f"revise_within_s must not be larger than remember_s, got {self.revise_within_s:g} and {self.remember_s:g}"
            )
        return self


class ScorerConfig(Part):
    """One scorer."""

    name: str = Field(min_length=1)
    """How rewards and tables name it; unique in the pipeline."""
    kind: str
    """A built-in scorer, or `package.module:function`."""
    version: int = Field(default=1, ge=1)
    """Version of the scorer; count it up whenever its code changes what it says."""
    config: dict[str, Any] = {}
    """What the scorer is given; its keys are the scorer's."""
    timeout_s: float = Field(default=10.0, gt=0)
    """After this long the score is missing, with the error `timeout`."""


class ScoreConfig(Part):
    """Score."""

    version: Literal[1] = 1
    """Version of the code."""
    max_concurrency: int = Field(default=16, ge=1)
    """Most scorers running at once in a process; a partition never asks for more."""
    scorers: Annotated[tuple[ScorerConfig, ...], Field(min_length=1)]
    """The scorers, in the order of the records."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [scorer.name for scorer in self.scorers]
        if len(set(names)) != len(names):
            raise ValueError(f"scorer names must be unique, got {names}")
        return self


class RewardConfig(Part):
    """Reward: the weighted sum of scores, clipped."""

    version: Literal[1] = 1
    """Version of the code."""
    components: Annotated[dict[str, Annotated[float, Field(ge=-1e15, le=1e15)]], Field(min_length=1)]
    """Weight of each scorer's value, by the scorer's name. Scorers not named here are recorded and not used."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward; None clips nothing."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip must be [lowest, highest], got {list(self.clip)}")
        return self


class CreditConfig(Part):
    """Credit."""

    version: int = Field(default=1, ge=1)
    """Version of the method's code."""
    method: str = "grpo"
    """Name in `rollstream.processors.credit.METHODS`."""
    config: dict[str, Any] = {}
    """The method's knobs; its keys are the method's."""


class BuildConfig(Part):
    """Build."""

    version: Literal[1] = 1
    """Version of the code."""
    layout: Literal["merge", "split"] = "merge"
    """`split` makes one sample a call; `merge` lets a call continue the sample whose ids are its prompt's prefix."""
    aggregation: Aggregation = Aggregation.ROLLOUT_MEAN
    """How token losses add up in an optimizer step."""
    constant: float | None = Field(default=None, gt=0)
    """C of `rollout_sum_constant`, usually the most tokens a rollout may sample; None for all other aggregations."""

    @model_validator(mode="after")
    def _constant_where_used(self) -> Self:
        if (self.constant is None) == (self.aggregation is Aggregation.ROLLOUT_SUM_CONSTANT):
            raise ValueError(
                f"constant must be set with aggregation 'rollout_sum_constant' and only then, got {self.constant!r} "
                f"with {self.aggregation.value!r}"
            )
        return self


class PipelineConfig(Part):
    """The whole file."""

    name: str = Field(min_length=1)
    """Name of the pipeline."""
    join: JoinConfig = JoinConfig()
    """Calls and environment events to rollouts."""
    group: GroupConfig = GroupConfig()
    """Rollouts to groups."""
    score: ScoreConfig
    """Raw scores of a group's rollouts."""
    reward: RewardConfig
    """Scores to rewards."""
    credit: CreditConfig = CreditConfig()
    """Rewards to advantages."""
    build: BuildConfig = BuildConfig()
    """Rollouts and advantages to samples."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a stage writes into every record it makes."""

    stage: StageRef
    """The stage, its version and the digest of its configuration."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""
