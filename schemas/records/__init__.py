"""The typed records, one class per Avro schema, and the table of them all.

Adding a record: write the class, add it to `RECORDS`, run `rollstream schemas write`, give it a topic file and
examples. Changing a released one: never; add `<record>.v<N+1>` with defaults for what is new. Then update readers first, writers
after them: `rollstream schemas check` says what may change.
"""

from __future__ import annotations

from typing import TypeAlias

from rollstream.schemas.records.calls import (
    CallDelivery,
    CallStarted,
    Delivery,
    Encoding,
    LogprobSemantics,
    ModelCall,
    Outcome,
    PromptDelta,
    RolloutOpened,
    SamplingParams,
    VersionSpan,
)
from rollstream.schemas.records.dead_letters import DeadLetter
from rollstream.schemas.records.environment import EnvironmentEvent, EventKind, RolloutStatus, Terminal
from rollstream.schemas.records.policies import PolicyVersion
from rollstream.schemas.records.rollouts import (
    ClosedBy,
    Group,
    GroupClose,
    GroupMember,
    MissingMember,
    Rollout,
    StageRef,
)
from rollstream.schemas.records.samples import (
    Aggregation,
    Consumption,
    Divisor,
    GroupBuilt,
    MaskedCall,
    Sample,
    SampleSegment,
    SkippedGroup,
)
from rollstream.schemas.records.stages import (
    Credit,
    CreditScope,
    CreditStatistics,
    CreditStatus,
    GroupCredits,
    GroupRewards,
    GroupScores,
    Reward,
    RewardComponent,
    Score,
)

Record: TypeAlias = (
    RolloutOpened
    | CallStarted
    | ModelCall
    | CallDelivery
    | EnvironmentEvent
    | Terminal
    | Rollout
    | Group
    | GroupScores
    | GroupRewards
    | GroupCredits
    | Sample
    | GroupBuilt
    | Consumption
    | PolicyVersion
    | DeadLetter
)
"""Whatever may stand in a topic."""

RECORDS: dict[str, type[Record]] = {
    "rollout_opened": RolloutOpened,
    "call_started": CallStarted,
    "model_call": ModelCall,
    "call_delivery": CallDelivery,
    "environment_event": EnvironmentEvent,
    "terminal": Terminal,
    "rollout": Rollout,
    "group": Group,
    "group_scores": GroupScores,
    "group_rewards": GroupRewards,
    "group_credits": GroupCredits,
    "sample": Sample,
    "group_built": GroupBuilt,
    "consumption": Consumption,
    "policy_version": PolicyVersion,
    "dead_letter": DeadLetter,
}
"""Schema file name without version → class of its newest version."""

__all__ = [
    "RECORDS",
    "Aggregation",
    "CallDelivery",
    "CallStarted",
    "ClosedBy",
    "Consumption",
    "Credit",
    "CreditScope",
    "CreditStatistics",
    "CreditStatus",
    "DeadLetter",
    "Delivery",
    "Divisor",
    "Encoding",
    "EnvironmentEvent",
    "EventKind",
    "Group",
    "GroupBuilt",
    "GroupClose",
    "GroupCredits",
    "GroupMember",
    "GroupRewards",
    "GroupScores",
    "LogprobSemantics",
    "MaskedCall",
    "MissingMember",
    "ModelCall",
    "Outcome",
    "PolicyVersion",
    "PromptDelta",
    "Record",
    "Reward",
    "RewardComponent",
    "Rollout",
    "RolloutOpened",
    "RolloutStatus",
    "Sample",
    "SampleSegment",
    "SamplingParams",
    "Score",
    "SkippedGroup",
    "StageRef",
    "Terminal",
    "VersionSpan",
]
