"""Check 1 continued: each call of a built group is in exactly one sample or masked, and the mask's reason is true.

A dead letter does not excuse a call here: what a written rollout holds must have a place in every group that was built of
it. So a late tool result, or a refused twin of a rollout, never hides a call that build has lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import (
    CreditScope,
    CreditStatus,
    Delivery,
    GroupBuilt,
    LogprobSemantics,
    ModelCall,
)
from rollstream.schemas.types import unpack_floats
from rollstream.sinks.rows import RolloutRow
from rollstream.sinks.view import Finding, View

ACCOUNTED = "accounted"

_EXCLUDED = {"aborted": "rollout_aborted", "group_too_small": "group_too_small", "score_missing": "no_reward"}
"""Why a rollout has no reward → why its calls are masked."""


def check_placed(view: View, built: GroupBuilt) -> Iterator[Finding]:
    """Findings over the calls of one built group's rollouts."""
    rows = view.credits.get(built.credits_digest)
    group = view.groups.get(rows[0].group_digest) if rows else None
    if group is None:
        return  # the lineage check says so
    members = [view.rollouts.get(member.rollout_digest) for member in group.members]
    expected = {
        (row.rollout_id, call_id)
        for row in members
        if row is not None
        for call_id in (*(ref.call_id for ref in row.calls), *row.lost_call_ids)
    }
    found = Counter((call.rollout_id, call.call_id) for call in built.masked)
    for sample in view.samples_of(built):
        found.update((sample.rollout_id, call_id) for call_id in {segment.call_id for segment in sample.segments})
    for rollout_id, call_id in sorted(expected - set(found)):
        message = (
            f"call of rollout {rollout_id!r} was started, its group {view.group_id!r} is built, and it is in no sample of it and "
            "not masked"
        )
        yield Finding(ACCOUNTED, call_id, message)
    for (rollout_id, call_id), places in sorted(found.items()):
        if (rollout_id, call_id) not in expected:
            yield Finding(ACCOUNTED, call_id, f"is in group {view.group_id!r}, and in no rollout of it")
        elif places > 1:
            message = (
                f"call of rollout {rollout_id!r} is in {places} places of its group, expected one sample or one mask"
            )
            yield Finding(ACCOUNTED, call_id, message)
    by_id = {row.rollout_id: row for row in members if row is not None}
    for masked in built.masked:
        if masked.rollout_id in by_id:
            truth = true_reasons(view, built, by_id[masked.rollout_id], masked.call_id)
            if masked.reason not in truth:
                message = f"is masked as {masked.reason!r}, its records say {' or '.join(sorted(truth)) or 'nothing against it'}"
                yield Finding(ACCOUNTED, masked.call_id, message)


def true_reasons(view: View, built: GroupBuilt, row: RolloutRow, call_id: str) -> set[str]:
    """The reasons for which a call may be masked; none if it should have been trained on."""
    if call_id in row.lost_call_ids:
        return {"lost"}
    by_credit = _by_credit(view, built, row, call_id)
    if by_credit:
        return by_credit
    calls = view.calls_of(row)  # not all that is stored: what came too late was no base for build
    attempts = [call for call in calls if call.call_id == call_id]
    reasons = _of_call(attempts[-1]) if attempts else set()
    if not reasons and call_id in decode_prompts(calls)[1]:
        return {"base_missing", "prompt_digest"}
    return reasons


def _by_credit(view: View, built: GroupBuilt, row: RolloutRow, call_id: str) -> set[str]:
    rows = view.credits.get(built.credits_digest, [])
    reward = next(
        (r.reward for r in view.rewards.get(rows[0].rewards_digest, ()) if r.reward.rollout_id == row.rollout_id),
        None,
    )
    if reward is None or reward.value is None:
        return {_EXCLUDED.get((reward and reward.excluded) or "", "no_reward")}
    may_train = (CreditStatus.OK, CreditStatus.NO_SPREAD)
    mine = [r.credit for r in rows if r.credit.rollout_id == row.rollout_id]
    if rows[0].scope is not CreditScope.ROLLOUT:
        mine = [credit for credit in mine if credit.call_id == call_id]
    if any(credit.status in may_train for credit in mine):
        return set()
    return {"no_baseline" if any(c.status is CreditStatus.NO_BASELINE for c in mine) else "no_reward"}


def _of_call(call: ModelCall) -> set[str]:
    """What speaks against a call by itself."""
    if not call.outcome.is_whole:
        return {"not_completed"}
    if not call.trainable or call.defects:
        return {call.defects[0] if call.defects else "not_trainable"}
    if call.delivered in (Delivery.NONE, Delivery.PARTIAL):
        return {"not_delivered"}
    reasons: set[str] = set()
    if not call.output_ids:
        reasons.add("empty_output")
    if len(call.output_ids) != len(call.output_logprobs):
        reasons.add("token_count_mismatch")
    elif not np.isfinite(unpack_floats(call.output_logprobs)).all():
        reasons.add("logprob_missing")
    if [i for span in call.version_spans for i in range(span.start, span.end)] != list(
        range(len(call.output_ids) // 4)
    ):
        reasons.add("span_gap")
    if call.logprob_semantics is LogprobSemantics.UNKNOWN:
        reasons.add("semantics_unknown")
    return reasons
