"""Check 3: every sample leads to its rollout, group, scores, rewards and credits, and each of them is what its digest says.

Records are rebuilt from their rows and digested anew, so a changed field anywhere below a sample is found here, whatever
else it breaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import (
    ClosedBy,
    Group,
    GroupBuilt,
    GroupCredits,
    GroupRewards,
    GroupScores,
    RolloutStatus,
    Sample,
)
from rollstream.schemas.types import unpack_ids
from rollstream.sinks.rows import CreditRow, RewardRow, RolloutRow, ScoreRow
from rollstream.sinks.view import Finding, View

LINEAGE = "rollout_traceable"


def check_records(view: View) -> Iterator[Finding]:
    """Findings over every derived record of the group: its digest, and the digest of what it names."""
    for row in view.evidence.rollouts:
        for message in _rollout(view, row):
            yield _finding(row.rollout_id, message)
        for message in _sources(view, row):
            yield _finding(row.rollout_id, message)
    for group in view.evidence.groups:
        found = view.rebuilt_group(group).digest
        if found != group.digest:
            yield _finding(group.group_id, f"group digest is {group.digest}, and its stored row gives {found}")
        for member in group.members:
            rollout = view.rollouts.get(member.rollout_digest)
            if rollout is None or (rollout.rollout_id, rollout.attempt) != (member.rollout_id, member.attempt):
                message = f"is a member with digest {member.rollout_digest}, and no such rollout is stored"
                yield _finding(member.rollout_id, message)
    for digest, scores in view.scores.items():
        yield from _entries(view, f"scores {digest}", digest, scores, view.rebuilt_scores(scores))
    for digest, rewards in view.rewards.items():
        yield from _entries(view, f"rewards {digest}", digest, rewards, view.rebuilt_rewards(rewards))
    for digest, credits in view.credits.items():
        yield from _entries(view, f"credits {digest}", digest, credits, view.rebuilt_credits(credits))


def _rollout(view: View, row: RolloutRow) -> Iterator[str]:
    rebuilt = view.rebuilt_rollout(row)
    if len(rebuilt.calls) != len(row.calls):
        yield f"has {len(row.calls)} calls, and {len(rebuilt.calls)} of them are stored"
    if len(rebuilt.events) != len(row.event_ids):
        yield f"has {len(row.event_ids)} environment events, and {len(rebuilt.events)} of them are stored"
    if rebuilt.digest != row.digest:
        yield f"its digest is {row.digest}, and its stored rows give {rebuilt.digest}"
    outputs = [(len(unpack_ids(call.output_ids)), call.trainable) for call in rebuilt.calls]
    tokens = (sum(n for n, _ in outputs), sum(n for n, is_trainable in outputs if is_trainable))
    if tokens != (row.sampled_tokens, row.trainable_tokens):
        yield f"counts {row.sampled_tokens} sampled and {row.trainable_tokens} trainable tokens, its calls have {tokens}"


def _entries(
    view: View,
    what: str,
    digest: str,
    rows: Sequence[ScoreRow] | Sequence[RewardRow] | Sequence[CreditRow],
    record: GroupScores | GroupRewards | GroupCredits | None,
) -> Iterator[Finding]:
    if sorted(row.position for row in rows) != list(range(len(rows))):
        yield _finding(view.group_id, f"{what} have places that are not 0 to {len(rows) - 1}")
    if record is None:
        yield _finding(view.group_id, f"{what} name a group or rewards that are not stored")
        return
    if record.digest != digest:
        yield _finding(view.group_id, f"{what}: the stored rows give digest {record.digest}")
    group = record.group
    if any(
        (r.group_id, r.group_revision, r.task_id) != (group.group_id, group.revision, group.task_id) for r in rows
    ):
        yield _finding(view.group_id, f"{what} name another group, revision or task than {group.group_id!r}")


def check_lineage(view: View, built: GroupBuilt) -> Iterator[Finding]:
    """Findings over one built group and its samples."""
    missing = [sample_id for sample_id in built.sample_ids if sample_id not in view.samples]
    if missing:
        yield _finding(built.group_id, f"names {len(missing)} samples that are not stored: {missing[:3]}")
    credits = view.credits.get(built.credits_digest)
    if credits is None:
        yield _finding(built.group_id, f"names credits {built.credits_digest}, which are not stored")
        return
    group = view.groups.get(credits[0].group_digest)
    if group is None:
        yield _finding(built.group_id, f"its credits name group {credits[0].group_digest}, which is not stored")
        return
    if tuple(sorted(member.rollout_id for member in group.members)) != built.rollout_ids:
        yield _finding(built.group_id, f"names rollouts {built.rollout_ids}, and the group has others")
    expected = (group.revision, group.task_id, group.closed_at_ms)
    if (built.group_revision, built.task_id, built.created_at_ms) != expected:
        yield _finding(built.group_id, "revision, task or time are not those of its group")
    for sample in view.samples_of(built):
        for message in _sample(view, built, sample, group, credits):
            yield _finding(sample.sample_id, message)


def _sample(view: View, built: GroupBuilt, sample: Sample, group: Group, credits: list[CreditRow]) -> Iterator[str]:
    row = view.rollouts.get(sample.rollout_digest)
    members = {member.rollout_digest: member for member in group.members}
    if row is None or sample.rollout_digest not in members:
        yield f"its rollout digest {sample.rollout_digest} is no member of its group"
        return
    rewards = {r.reward.rollout_id: r.reward for r in view.rewards.get(sample.rewards_digest, ())}
    scores = view.scores.get(sample.scores_digest)
    if not rewards:
        yield f"names rewards {sample.rewards_digest}, which are not stored"
    if not scores:
        yield f"names scores {sample.scores_digest}, which are not stored"
    first = credits[0]
    reward = rewards.get(sample.rollout_id)
    attempts = {ref.call_id: ref.call_attempt for ref in row.calls}
    segments = [[s.call_id, attempts.get(s.call_id), s.start, s.end, s.prompt_digest] for s in sample.segments]
    lineage = digest_json("sample", sample.rollout_digest, sample.credits_digest, built.stage.config_digest, segments)
    pairs = {
        "sample_id": (sample.sample_id, lineage),
        "group_id": (sample.group_id, group.group_id),
        "group_revision": (sample.group_revision, group.revision),
        "rollout_id": (sample.rollout_id, row.rollout_id),
        "rollout_attempt": (sample.rollout_attempt, row.attempt),
        "task_id": (sample.task_id, row.task_id),
        "policy": (sample.policy, row.policy),
        "status": (sample.status, row.status),
        "credits_digest": (sample.credits_digest, built.credits_digest),
        "rewards_digest": (sample.rewards_digest, first.rewards_digest),
        "scores_digest": (sample.scores_digest, first.scores_digest),
        "stages": (sample.stages, (*first.earlier_stages, first.stage, built.stage)),
        "created_at_ms": (sample.created_at_ms, group.closed_at_ms),
        "pipeline": (sample.pipeline, built.pipeline),
        "pipeline_digest": (sample.pipeline_digest, built.pipeline_digest),
        "reward": (sample.reward, reward.value if reward else None),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            yield f"{name} is {found!r}, expected {expected!r}"


def _sources(view: View, row: RolloutRow) -> Iterator[str]:
    """The rollout says what its opening and its terminal said."""
    key = (row.rollout_id, row.attempt)
    openings = [o for o in view.evidence.openings if (o.rollout_id, o.attempt) == key]
    if openings and not any(
        (o.group_size, o.task_id, o.task, o.policy) == (row.group_size, row.task_id, row.task, row.policy)
        for o in openings
    ):
        yield "group size, task or policy are not those of its opening"
    if row.closed_by is not ClosedBy.BARRIER:
        return
    terminals = [t for t in view.evidence.terminals if (t.rollout_id, t.attempt) == key]
    if not terminals:
        yield "was closed by its terminal, and none is stored"
    elif not any(
        row.status in (t.status, RolloutStatus.ABORTED)
        and (t.outcome, t.finished_at_ms) == (row.outcome, row.closed_at_ms)
        and (openings or (t.group_size, t.task_id) == (row.group_size, row.task_id))
        for t in terminals
    ):
        yield "status, outcome, task or closing time are not those of its terminal"


def _finding(about: str, message: str) -> Finding:
    return Finding(LINEAGE, about, message)
