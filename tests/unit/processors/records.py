"""Records with plain values, to vary in tests of stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollstream.processors.config import Signature
from rollstream.schemas.codec import with_digest
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import (
    CallStarted,
    ClosedBy,
    Credit,
    CreditScope,
    CreditStatistics,
    CreditStatus,
    EnvironmentEvent,
    EventKind,
    Group,
    GroupClose,
    GroupCredits,
    GroupMember,
    ModelCall,
    Reward,
    Rollout,
    RolloutOpened,
    RolloutStatus,
    StageRef,
    Terminal,
)
from rollstream.schemas.types import Json
from tests.unit.schemas.calls import a_call

OPENED_MS = 1_000_000
SIGNATURE = Signature(StageRef("stage", "kind", 1, "config"), "default", "pipeline")


def opened(rollout_id: str = "r-1", attempt: int = 0, **changes: Any) -> RolloutOpened:
    """The opening of a rollout in a group of two."""
    record = RolloutOpened(rollout_id, attempt, "g-1", 2, "task", OPENED_MS, Json('{"answer": "4"}'))
    return replace(record, **changes)


def call(call_id: str, index: int = 0, rollout_id: str = "r-1", **changes: Any) -> ModelCall:
    """A completed call, some time after the opening."""
    times = {"started_at_ms": OPENED_MS + 10 * index, "finished_at_ms": OPENED_MS + 10 * index + 5}
    return replace(a_call(call_id, rollout_id=rollout_id, call_index=index), **{**times, **changes})


def started(of: ModelCall) -> CallStarted:
    """The intent of a call."""
    return CallStarted(
        of.call_id, of.rollout_id, of.attempt, of.group_id, of.call_index, of.prompt.length, of.prompt.digest,
        of.request_digest, of.started_at_ms, of.call_attempt,
    )  # fmt: skip


def happened(event_id: str, rollout_id: str = "r-1", **changes: Any) -> EnvironmentEvent:
    """An environment event."""
    record = EnvironmentEvent(event_id, rollout_id, 0, "g-1", EventKind.TOOL_RESULT, Json("{}"), OPENED_MS + 7)
    return replace(record, **changes)


def terminal(rollout_id: str = "r-1", **changes: Any) -> Terminal:
    """The end of a rollout with reward 1."""
    record = Terminal(
        rollout_id, 0, "g-1", 2, "task", RolloutStatus.SUCCEEDED, OPENED_MS + 100, Json('{"reward": 1}')
    )
    return replace(record, **changes)


def conversation(calls: int, output_tokens: int = 3, rollout_id: str = "r-1", seed: int = 0) -> list[ModelCall]:
    """Calls whose prompts each extend the call before by two tokens of context."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 100, 4).astype(np.uint32)
    known: dict[str, np.ndarray] = {}
    made = []
    for index in range(calls):
        output = rng.integers(0, 100, output_tokens)
        call_id = f"{rollout_id}.c{index}"
        one = a_call(
            call_id, prompt=encode_prompt(ids, known), output=[int(i) for i in output], rollout_id=rollout_id
        )
        made.append(replace(one, call_index=index))
        known[call_id] = np.concatenate([ids, output.astype(np.uint32)])
        ids = np.concatenate([known[call_id], rng.integers(0, 100, 2).astype(np.uint32)])
    return made


def a_rollout(rollout_id: str = "r-1", calls: Sequence[ModelCall] = (), **changes: Any) -> Rollout:
    """A complete rollout in a group of two, with its digest."""
    record = Rollout(
        rollout_id=rollout_id,
        attempt=0,
        group_id="g-1",
        group_size=2,
        task_id="task",
        task=Json('{"answer": "4"}'),
        policy="default",
        status=RolloutStatus.SUCCEEDED,
        outcome=Json('{"reward": 1}'),
        closed_by=ClosedBy.BARRIER,
        calls=tuple(calls),
        lost_call_ids=(),
        events=(),
        opened_at_ms=OPENED_MS,
        closed_at_ms=OPENED_MS + 100,
        digest="",
        stage=SIGNATURE.stage,
        pipeline="default",
        pipeline_digest="pipeline",
    )
    return with_digest(replace(record, **changes))


def with_reward(rollout_id: str, reward: float, **changes: Any) -> Rollout:
    """A rollout whose environment says this."""
    return a_rollout(rollout_id, outcome=Json(json.dumps({"reward": reward})), **changes)


def a_group(rollouts: Sequence[Rollout], **changes: Any) -> Group:
    """A full group of these rollouts."""
    members = [
        GroupMember(r.rollout_id, r.attempt, r.digest, r.status, len(r.calls), 0, r.closed_at_ms)
        for r in sorted(rollouts, key=lambda r: r.rollout_id)
    ]
    record = Group(
        group_id="g-1",
        revision=0,
        group_size=len(members),
        task_id="task",
        closed_by=GroupClose.FULL,
        members=tuple(members),
        missing=(),
        closed_at_ms=OPENED_MS + 200,
        digest="",
        stage=SIGNATURE.stage,
        pipeline="default",
        pipeline_digest="pipeline",
    )
    return with_digest(replace(record, **changes))


def some_credits(rollouts: Sequence[Rollout], values: Sequence[float], **changes: Any) -> GroupCredits:
    """Rollout-scope credits, all `ok`, for a group of these rollouts."""
    stage = SIGNATURE.stage
    record = GroupCredits(
        group=a_group(rollouts),
        rewards_digest="rewards",
        scope=CreditScope.ROLLOUT,
        credits=tuple(Credit(r.rollout_id, CreditStatus.OK, v) for r, v in zip(rollouts, values, strict=True)),
        rewards=tuple(Reward(r.rollout_id, (), v) for r, v in zip(rollouts, values, strict=True)),
        statistics=CreditStatistics(len(rollouts), 0.0, 0.0, 0.0),
        digest="",
        stage=stage,
        scores_digest="scores",
        earlier_stages=(stage, stage),
        pipeline="default",
        pipeline_digest="pipeline",
    )
    return with_digest(replace(record, **changes))
