"""From one token of a sample back to everything that made it a training signal; `rollstream explain`.

token → call → its true prefix → rollout → group → raw scores → reward → credit → the stages' versions.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from rollstream.errors import AuditError
from rollstream.schemas.identity import digest_ids
from rollstream.schemas.records import (
    Credit,
    CreditScope,
    Reward,
    Sample,
    SampleSegment,
    Score,
    StageRef,
    VersionSpan,
)
from rollstream.schemas.types import pack_ids, unpack_floats, unpack_ids, unpack_mask
from rollstream.sinks.stored import Evidence, Stored
from rollstream.sinks.view import View

T = TypeVar("T")

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a sampled token comes from, and why it has the advantage that it has."""

    sample_id: str
    """The sample."""
    token: int
    """Position in the sample."""
    token_id: int
    """The token."""
    logprob: float
    """Its rollout log-probability."""
    version: int
    """Policy version that sampled it."""
    advantage: float
    """Its advantage."""
    loss_weight: float
    """Weight of its loss, before the divisor."""
    aggregation: str
    """What the weight stands for, and what the trainer still divides by."""
    call: dict[str, Any]
    """The call: id, index, number in its rollout, output token, sampling, engine, encoding, finish reason."""
    prefix_length: int
    """Number of tokens that it was sampled under."""
    prompt_length: int
    """Number of them that were the call's prompt."""
    prompt_digest: str
    """Digest of that prompt, as the call recorded it."""
    prefix_holds: bool
    """Whether the sample's tokens have that digest."""
    rollout: dict[str, Any]
    """The rollout: id, attempt, status, task, calls, digest."""
    group: dict[str, Any]
    """The group: id, revision, size, closing, members, digest."""
    scores: list[Score]
    """Raw scores of the rollout."""
    reward: Reward
    """Its reward, with its components."""
    credit: Credit
    """The credit that the token got."""
    baseline: dict[str, Any]
    """What rewards were compared with."""
    stages: list[StageRef]
    """Join, group, score, reward, credit and build, with versions and configuration digests."""
    pipeline: str
    """Name and digest of the pipeline."""
    consumed_by: list[str]
    """Optimizer steps that trained on the sample, as `trainer step N`."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return cast("dict[str, Any]", json.loads(json.dumps(asdict(self))))

    def __str__(self) -> str:
        call, rollout, group = self.call, self.rollout, self.group
        parts = " + ".join(f"{c.scorer} {c.raw:g} × {c.weight:g}" for c in self.reward.components) or "no component"
        stages = ", ".join(f"{s.name} {s.kind} v{s.version} ({s.config_digest[:8]})" for s in self.stages)
        return "\n".join(
            [
                f"sample   {self.sample_id}, token {self.token}",
                f"token    id {self.token_id}, log-probability {self.logprob:.6g}, policy version {self.version}",
                f"call     {call['call_id']} (number {call['number']} of the rollout, output token {call['output_token']} of "
                f"{call['output_tokens']}, {call['finish_reason']}), temperature {call['temperature']:g}, {call['engine']}",
                f"prefix   {self.prefix_length} tokens: the call's prompt of {self.prompt_length} (digest {self.prompt_digest}, "
                f"{'verified' if self.prefix_holds else 'NOT the tokens of this sample'}), then its output before this token",
                f"rollout  {rollout['rollout_id']} attempt {rollout['attempt']}: {rollout['status']}, task {rollout['task_id']}, "
                f"{rollout['calls']} calls (digest {rollout['digest']})",
                f"group    {group['group_id']} revision {group['revision']}: {group['members']} of {group['group_size']} "
                f"rollouts, closed by {group['closed_by']} (digest {group['digest']})",
                *(
                    f"score    {score.scorer} ({score.kind} v{score.version}): "
                    + (f"{score.value:g}" if score.value is not None else f"none, {score.error}")
                    for score in self.scores
                ),
                f"reward   {'none' if self.reward.value is None else format(self.reward.value, 'g')} = {parts}",
                f"credit   {self.credit.value:g} ({self.credit.status.value}), against mean {self.baseline['mean']:g} and std "
                f"{self.baseline['std']:g} of {self.baseline['count']} rewards",
                f"weight   {self.loss_weight:g} ({self.aggregation})",
                f"stages   {stages}",
                f"pipeline {self.pipeline}",
                f"trained  {', '.join(self.consumed_by) or 'not yet'}",
            ]
        )


def explain(client: Client, sample_id: str, token: int | None = None) -> Explanation:
    """Explain one token of a stored sample.

    Args:
        client: from `connect`.
        token: position in the sample, from 0; None takes the first sampled one.
    Raises: AuditError: there is no such sample or token, the token was not sampled, or something on the way is not stored.
    """
    stored = Stored(client)
    found = stored.query("SELECT DISTINCT group_id FROM samples WHERE sample_id = {id:String}", {"id": sample_id})
    if not found:
        raise AuditError(
            f"cannot explain sample {sample_id!r}: it is not stored; SELECT sample_id FROM samples, or wait for the sink",
            reason="unknown_sample",
        )
    (evidence,) = stored.load([found[0][0]])
    steps = stored.query(
        "SELECT DISTINCT trainer, step FROM consumptions WHERE has(sample_ids, {id:String}) ORDER BY ALL",
        {"id": sample_id},
    )
    return explain_sample(evidence, sample_id, token, [f"{trainer} step {step}" for trainer, step in steps])


def explain_sample(evidence: Evidence, sample_id: str, token: int | None, consumed_by: list[str]) -> Explanation:
    """Explain one token over the rows of its group."""
    view = View(evidence)
    sample = view.samples[sample_id]
    token, segment = _place(sample, token)
    ids = unpack_ids(sample.ids)
    row = _stored(view.rollouts.get(sample.rollout_digest), sample_id, f"rollout {sample.rollout_digest}")
    output = pack_ids(ids[segment.start : segment.end])
    call = _stored(view.call_of_segment(row, segment.call_id, output), sample_id, f"call {segment.call_id!r}")
    credits = _stored(view.credits.get(sample.credits_digest), sample_id, f"credits {sample.credits_digest}")
    rewards = _stored(view.rewards.get(sample.rewards_digest), sample_id, f"rewards {sample.rewards_digest}")
    scores = _stored(view.scores.get(sample.scores_digest), sample_id, f"scores {sample.scores_digest}")
    group = _stored(view.groups.get(credits[0].group_digest), sample_id, f"group {credits[0].group_digest}")
    at = token - segment.start
    mine = [credit.credit for credit in credits if credit.credit.rollout_id == sample.rollout_id]
    credit = next((c for c in mine if _applies(c, credits[0].scope, call.call_id, at)), None)
    reward = next((r.reward for r in rewards if r.reward.rollout_id == sample.rollout_id), None)
    statistics = credits[0].statistics
    return Explanation(
        sample_id=sample_id,
        token=token,
        token_id=int(ids[token]),
        logprob=float(unpack_floats(sample.logprobs)[token]),
        version=_version(sample.versions, token),
        advantage=float(unpack_floats(sample.advantages)[token]),
        loss_weight=sample.loss_weight,
        aggregation=f"{sample.aggregation.value}, divided by {sample.divisor.value} of the step",
        call={
            "call_id": call.call_id,
            "call_index": call.call_index,
            "number": 1 + [ref.call_id for ref in row.calls].index(call.call_id),
            "call_attempt": call.call_attempt,
            "output_token": at,
            "output_tokens": segment.end - segment.start,
            "finish_reason": call.finish_reason,
            "temperature": call.sampling.temperature,
            "top_p": call.sampling.top_p,
            "top_k": call.sampling.top_k,
            "logprob_semantics": call.logprob_semantics.value,
            "engine": f"{call.engine} {call.engine_version}",
            "encoding": asdict(call.encoding),
        },
        prefix_length=token,
        prompt_length=segment.start,
        prompt_digest=call.prompt.digest,
        prefix_holds=digest_ids(pack_ids(ids[: segment.start])) == call.prompt.digest == segment.prompt_digest,
        rollout={
            "rollout_id": row.rollout_id,
            "attempt": row.attempt,
            "status": row.status.value,
            "task_id": row.task_id,
            "calls": len(row.calls),
            "digest": row.digest,
        },
        group={
            "group_id": group.group_id,
            "revision": group.revision,
            "group_size": group.group_size,
            "closed_by": group.closed_by.value,
            "members": len(group.members),
            "digest": group.digest,
        },
        scores=[score.score for score in scores if score.score.rollout_id == sample.rollout_id],
        reward=_stored(reward, sample_id, f"reward of rollout {sample.rollout_id!r}"),
        credit=_stored(credit, sample_id, f"credit of token {token}"),
        baseline={"count": statistics.count, "mean": statistics.mean, "std": statistics.std},
        stages=[row.stage, group.stage, *sample.stages],
        pipeline=f"{sample.pipeline} ({sample.pipeline_digest})",
        consumed_by=consumed_by,
    )


def _place(sample: Sample, token: int | None) -> tuple[int, SampleSegment]:
    """Position and segment of a sampled token."""
    mask = unpack_mask(sample.mask)
    sampled = np.flatnonzero(mask)
    if not len(sampled):
        raise AuditError(f"cannot explain sample {sample.sample_id!r}: it has no sampled token", reason="no_tokens")
    if token is None:
        token = int(sampled[0])
    if not 0 <= token < len(mask):
        raise AuditError(
            f"cannot explain token {token} of sample {sample.sample_id!r}: it has tokens 0 to {len(mask) - 1}",
            reason="token_out_of_range",
        )
    for segment in sample.segments:
        if segment.start <= token < segment.end:
            return token, segment
    near = int(min(sampled, key=lambda position: abs(int(position) - token)))
    raise AuditError(
        f"cannot explain token {token} of sample {sample.sample_id!r}: it was not sampled, it is part of a prompt; the nearest "
        f"sampled one is {near}",
        reason="token_not_sampled",
    )


def _applies(credit: Credit, scope: CreditScope, call_id: str, at: int) -> bool:
    if scope is CreditScope.ROLLOUT:
        return True
    if credit.call_id != call_id:
        return False
    return scope is CreditScope.CALL or (credit.start or 0) <= at < (at + 1 if credit.end is None else credit.end)


def _version(spans: tuple[VersionSpan, ...], token: int) -> int:
    return next((span.version for span in spans if span.start <= token < span.end), -1)


def _stored(value: T | None, sample_id: str, what: str) -> T:
    if value is None:
        raise AuditError(
            f"cannot explain sample {sample_id!r}: {what} is not stored; run `rollstream audit`", reason="not_stored"
        )
    return value
