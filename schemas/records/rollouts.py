"""What join and group write: a complete rollout, and a closed group of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollstream.schemas.records.calls import ModelCall
from rollstream.schemas.records.environment import EnvironmentEvent, RolloutStatus
from rollstream.schemas.types import Json


@dataclass(frozen=True, slots=True)
class StageRef:
    """Which stage made a record, exactly."""

    name: str
    """Stage name in the pipeline file, for instance `credit`."""
    kind: str
    """What runs there, for instance `grpo`."""
    version: int
    """Version of that method's code."""
    config_digest: str
    """Digest of the stage's fully resolved configuration."""


class ClosedBy(StrEnum):
    """What closed a rollout."""

    BARRIER = "barrier"
    """Its terminal was read in all three source topics."""
    DEADLINE = "deadline"
    """No terminal came in time."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """R = (x, C, e, v): task, model calls, environment evidence, versions."""

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
    """How the rollout ended."""
    outcome: Json
    """What the environment says about the result."""
    closed_by: ClosedBy
    """What closed it."""
    calls: tuple[ModelCall, ...]
    """All calls, in order of call_index, then call_id, then call_attempt; a started call without outcome is not here."""
    lost_call_ids: tuple[str, ...]
    """Calls with an intent and no outcome."""
    events: tuple[EnvironmentEvent, ...]
    """Environment evidence, in log order."""
    opened_at_ms: int
    """UTC epoch milliseconds."""
    closed_at_ms: int
    """Event time of the closing, UTC epoch milliseconds."""
    digest: str
    """blake2b-128 over the content above, in Avro's binary form with this field empty."""
    stage: StageRef
    """The join."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""
    version_min: int | None = None
    """Oldest policy version that sampled a token; None without tokens."""
    version_max: int | None = None
    """Newest policy version that sampled a token; None without tokens."""


class GroupClose(StrEnum):
    """Why a group was closed."""

    FULL = "full"
    """All its rollouts are in."""
    TIMEOUT = "timeout"
    """The deadline passed; at least the minimum size is in."""
    PARTIAL = "partial"
    """The deadline passed with fewer than the minimum size; the group is not trained on."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One rollout of a group, without its tokens."""

    rollout_id: str
    """The rollout."""
    attempt: int
    """Its attempt."""
    rollout_digest: str
    """Digest of the rollout record."""
    status: RolloutStatus
    """How it ended."""
    num_calls: int
    """Number of calls with an outcome."""
    trainable_tokens: int
    """Sampled tokens in trainable calls (N_i)."""
    closed_at_ms: int
    """When it closed, event time."""
    version_min: int | None = None
    """Oldest policy version in it."""
    version_max: int | None = None
    """Newest policy version in it."""


@dataclass(frozen=True, slots=True)
class MissingMember:
    """A place in the group that nobody filled."""

    reason: str
    """Reason code: `not_in_time`, `late_for_group`."""
    rollout_id: str | None = None
    """The rollout, if it is known."""


@dataclass(frozen=True, slots=True)
class Group:
    """A closed group: whose rollouts may be compared with each other."""

    group_id: str
    """The group."""
    revision: int
    """0 at first; counts up if the policy admits late members."""
    group_size: int
    """How many rollouts it was to have."""
    task_id: str
    """Name of the task."""
    closed_by: GroupClose
    """Why it was closed."""
    members: tuple[GroupMember, ...]
    """Its rollouts, sorted by rollout_id."""
    missing: tuple[MissingMember, ...]
    """What is missing, and why."""
    closed_at_ms: int
    """Event time of the closing."""
    digest: str
    """blake2b-128 over members and closing."""
    stage: StageRef
    """The group stage."""
    pipeline: str
    """Name of the pipeline."""
    pipeline_digest: str
    """Digest of the resolved pipeline file."""
