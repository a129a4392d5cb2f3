"""What the environment side writes: events while a rollout runs, and the terminal that closes it.

The terminal is the rollout's barrier: it is written last into each of the topics `calls`, `environment` and
`terminals`. A rollout is complete when its terminal has been read in all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollstream.schemas.types import Json


class EventKind(StrEnum):
    """What an environment event reports."""

    OBSERVATION = "observation"
    """Something the environment showed the agent."""
    TOOL_RESULT = "tool_result"
    """The result of a tool call."""
    STATE = "state"
    """A snapshot of the environment's state."""
    ARTIFACT = "artifact"
    """A file or other product, by reference when large."""
    REWARD = "reward"
    """A reward for one call."""


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    SUCCEEDED = "succeeded"
    """The harness says the task was done."""
    FAILED = "failed"
    """The harness says the task was not done."""
    TRUNCATED = "truncated"
    """Stopped by a limit on turns, tokens or time that belongs to the task."""
    ABORTED = "aborted"
    """Stopped from outside; not the agent's doing."""
    TIMED_OUT = "timed_out"
    """Closed by the join's deadline, since no terminal came."""


@dataclass(frozen=True, slots=True)
class EnvironmentEvent:
    """One thing that happened in the environment."""

    event_id: str
    """Unique within the rollout; a repeated id with equal content is a duplicate."""
    rollout_id: str
    """The rollout."""
    attempt: int
    """The rollout's attempt."""
    group_id: str
    """The rollout's group."""
    kind: EventKind
    """What this event reports."""
    content: Json
    """The observation, result, state or artifact."""
    at_ms: int
    """UTC epoch milliseconds."""
    call_id: str | None = None
    """The call this event follows, if the harness knows it."""
    reward: float | None = None
    """Reward of that call, if there is one."""
    is_executable: bool | None = None
    """False if the action could not be carried out (after SPA-RL); None if unknown."""
    state_key: str | None = None
    """Digest of the environment's state after the event, if the harness gives one."""
    content_ref: str | None = None
    """Where the content is stored when it is too large to stand here."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """The end of a rollout attempt."""

    rollout_id: str
    """The rollout."""
    attempt: int
    """The rollout's attempt."""
    group_id: str
    """The rollout's group."""
    group_size: int
    """How many rollouts the group shall have."""
    task_id: str
    """Name of the task."""
    status: RolloutStatus
    """How the rollout ended."""
    finished_at_ms: int
    """UTC epoch milliseconds."""
    outcome: Json = Json("{}")
    """What the environment says about the result; read by scorers."""
    expected_calls: int | None = None
    """Number of calls started, where one writer knows it; a second check beside the barrier."""
    expected_events: int | None = None
    """Number of environment events written, where one writer knows it."""
