"""What was built of a group against the ledger: samples hold what the engine said, and weigh what the rewards say. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from chaos.ledger import GroupTruth
from chaos.problem import Problem, Rules
from chaos.truth import Sampled, to_ids
from rollstream.schemas.prompts import Ids
from rollstream.schemas.records import Aggregation, ClosedBy, Group, GroupBuilt, GroupClose, RolloutStatus, Sample
from rollstream.schemas.types import unpack_floats, unpack_ids, unpack_mask
from rollstream.sinks.rows import RolloutRow
from rollstream.sinks.stored import Evidence

_CLOSE = 1e-6


class BuiltCheck:
    """Checks what build wrote of one group.

    Args:
        rows: the group's rollouts, by rollout and attempt.
        spoken: prompt and what the engine said to it, by call id; one an attempt.
    """

    def __init__(
        self,
        truth: GroupTruth,
        evidence: Evidence,
        rules: Rules,
        rows: Mapping[tuple[str, int], Sequence[RolloutRow]],
        spoken: Mapping[str, Sequence[tuple[Ids, Sampled]]],
    ) -> None:
        self._truth = truth
        self._evidence = evidence
        self._rules = rules
        self._rows = rows
        self._spoken = spoken

    def check(self, built: GroupBuilt) -> Iterator[Problem]:
        """Samples are the calls' outputs under their prompts, and weigh what the ledger's rewards say."""
        group = next((g for g in self._evidence.groups if g.revision == built.group_revision), None)
        if group is None:
            yield Problem(
                "lost", built.group_id, f"revision {built.group_revision} was built, and its group is not stored"
            )
            return
        by_id = {one.sample_id: one for one in self._evidence.samples}
        for sample_id in set(built.sample_ids) - by_id.keys():
            yield Problem("lost", sample_id, f"is named by group {built.group_id!r}, and not stored")
        samples = [by_id[sample_id] for sample_id in built.sample_ids if sample_id in by_id]
        rewards = {
            member.rollout_id: self._reward(group, member.rollout_id, member.attempt) for member in group.members
        }
        yield from self._places(group, built, samples, rewards)
        advantages = advantages_of(rewards, self._rules)
        for one in samples:
            yield from self._tokens(one)
            yield from self._weights(one, rewards.get(one.rollout_id), advantages.get(one.rollout_id))
        weights: Counter[str] = Counter()
        for one in samples:
            if one.aggregation is Aggregation.ROLLOUT_MEAN:
                weights[one.rollout_id] += one.loss_weight * one.sampled_tokens  # type: ignore[assignment]
        for rollout_id, weight in weights.items():
            if not math.isclose(weight, 1.0, rel_tol=_CLOSE):
                yield Problem("wrong", rollout_id, f"the weights of its samples add up to {weight!r}, expected 1")

    def _reward(self, group: Group, rollout_id: str, number: int) -> float | None:
        """The reward that the ledger gives a member; None if it has none."""
        rows = self._rows.get((rollout_id, number))
        attempt = self._truth.attempts.get((rollout_id, number))
        if not rows or attempt is None or group.closed_by is GroupClose.PARTIAL:
            return None
        row = rows[0]
        if row.closed_by is not ClosedBy.BARRIER or row.status is RolloutStatus.ABORTED or not attempt.finishes:
            return None
        reward = attempt.finishes[0]["reward"]
        return None if reward is None else min(max(float(reward), self._rules.clip[0]), self._rules.clip[1])

    def _places(
        self, group: Group, built: GroupBuilt, samples: Sequence[Sample], rewards: dict[str, float | None]
    ) -> Iterator[Problem]:
        """Each call of a member has one place; what a client relies on is masked only where there is nothing to learn."""
        places = Counter(call.call_id for call in built.masked)
        used = Counter(segment.call_id for one in samples for segment in one.segments)
        places.update(used)
        has_baseline = sum(value is not None for value in rewards.values()) > 1
        for member in group.members:
            key = (member.rollout_id, member.attempt)
            rows, attempt = self._rows.get(key), self._truth.attempts.get(key)
            if not rows or attempt is None:
                continue
            told = {line["id"] for line in attempt.calls if line["ok"]}
            for call_id in {*(ref.call_id for ref in rows[0].calls), *rows[0].lost_call_ids}:
                is_taught = has_baseline and rewards[member.rollout_id] is not None
                if places[call_id] == 0:
                    yield Problem(
                        "lost", call_id, f"is in rollout {key}, and in no sample of its group and not masked"
                    )
                elif places[call_id] > 1:
                    yield Problem("doubled", call_id, f"is in {places[call_id]} places of group {built.group_id!r}")
                elif call_id in told and is_taught and not used[call_id]:
                    why = next(call.reason for call in built.masked if call.call_id == call_id)
                    yield Problem("lost", call_id, f"was acknowledged, and is masked as {why!r}")
                elif used[call_id] and not is_taught:
                    yield Problem(
                        "wrong", call_id, f"is trained on, and {key} has no reward or nothing to compare it with"
                    )

    def _tokens(self, one: Sample) -> Iterator[Problem]:
        ids, mask, logprobs = unpack_ids(one.ids), unpack_mask(one.mask), unpack_floats(one.logprobs)
        expected_mask = np.zeros(len(ids), dtype=np.uint8)
        versions = {at: span.version for span in one.versions for at in range(span.start, span.end)}
        for segment in one.segments:
            expected_mask[segment.start : segment.end] = 1
            fits = any(
                np.array_equal(ids[: segment.start], prompt)
                and np.array_equal(ids[segment.start : segment.end], to_ids(said.tokens))
                and np.array_equal(logprobs[segment.start : segment.end], np.array(said.logprobs, dtype=np.float32))
                and all(
                    versions.get(segment.start + at) == span.version
                    for span in said.spans
                    for at in range(span.start, span.end)
                )
                for prompt, said in self._spoken[segment.call_id]
            )
            if not fits:
                message = f"its part of call {segment.call_id!r} is not what the engine said after that call's prompt"
                yield Problem("wrong", one.sample_id, message)
        if not np.array_equal(mask, expected_mask):
            yield Problem("wrong", one.sample_id, "its mask is not the outputs of its calls")
        if not np.isnan(logprobs[expected_mask == 0]).all():
            yield Problem("wrong", one.sample_id, "it has log-probabilities where nothing was sampled")

    def _weights(self, one: Sample, reward: float | None, advantage: float | None) -> Iterator[Problem]:
        if reward is None or not math.isclose(one.reward, reward, rel_tol=_CLOSE, abs_tol=_CLOSE):
            yield Problem("wrong", one.sample_id, f"has reward {one.reward!r}, the client sent {reward!r}")
        mask = unpack_mask(one.mask) == 1
        found = unpack_floats(one.advantages)
        if advantage is None or not np.allclose(found[mask], advantage, rtol=1e-5, atol=_CLOSE) or found[~mask].any():
            yield Problem("wrong", one.sample_id, f"its advantages are not {advantage!r}, which the rewards give")


def advantages_of(rewards: dict[str, float | None], rules: Rules) -> dict[str, float]:
    """GRPO's advantage of each rollout that has a reward; 0 where all are equal, and none with fewer than two."""
    values = [value for value in rewards.values() if value is not None]
    if len(values) < 2:
        return {}
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - rules.ddof))
    is_flat = max(values) - min(values) <= 1e-9
    return {
        name: 0.0 if is_flat else (value - mean) / (std + rules.eps)
        for name, value in rewards.items()
        if value is not None
    }
