"""Check 5: however a rollout's calls were cut into samples, its weight in the loss is the declared one.

Source: the table of target weights per aggregation in the docs on loss weights (w* per token, mass per rollout).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from rollstream.schemas.records import Aggregation, Divisor, GroupBuilt, Sample
from rollstream.schemas.types import unpack_ids, unpack_mask
from rollstream.sinks.view import Finding, View

WEIGHTS = "packing"

_DIVISOR = {
    Aggregation.TOKEN_MEAN: Divisor.TOKENS,
    Aggregation.TOKEN_SUM: Divisor.NONE,
    Aggregation.ROLLOUT_MEAN: Divisor.ROLLOUTS,
    Aggregation.ROLLOUT_SUM: Divisor.ROLLOUTS,
    Aggregation.ROLLOUT_SUM_CONSTANT: Divisor.ROLLOUTS,
}


def check_weights(view: View, built: GroupBuilt, constants: dict[str, float]) -> Iterator[Finding]:
    """Findings over the samples of one built group.

    Args: constants: weight of `rollout_sum_constant` by digest of the build configuration, as first seen; filled in here.
    """
    by_rollout: dict[str, list[Sample]] = defaultdict(list)
    for sample in view.samples_of(built):
        by_rollout[sample.rollout_id].append(sample)
    group_tokens = sum(_sampled(sample) for samples in by_rollout.values() for sample in samples)
    for rollout_id, samples in by_rollout.items():
        tokens = sum(_sampled(sample) for sample in samples)
        calls = {segment.call_id for sample in samples for segment in sample.segments}
        for index, sample in enumerate(sorted(samples, key=lambda s: s.sample_index)):
            counts = {
                "sampled_tokens": (sample.sampled_tokens, _sampled(sample)),
                "rollout_tokens": (sample.rollout_tokens, tokens),
                "group_tokens": (sample.group_tokens, group_tokens),
                "group_rollouts": (sample.group_rollouts, len(by_rollout)),
                "rollout_samples": (sample.rollout_samples, len(samples)),
                "sample_index": (sample.sample_index, index),
                "divisor": (sample.divisor, _DIVISOR[sample.aggregation]),
            }
            for name, (found, expected) in counts.items():
                if found != expected:
                    yield Finding(WEIGHTS, sample.sample_id, f"{name} is {found!r}, expected {expected!r}")
        mass = math.fsum(_sampled(sample) * sample.loss_weight for sample in samples)
        expected_mass = _mass(samples[0], tokens, constants)
        if not math.isclose(mass, expected_mass, rel_tol=1e-12):
            yield Finding(
                WEIGHTS,
                rollout_id,
                f"its tokens weigh {mass!r} together, {samples[0].aggregation.value} asks for {expected_mass!r}",
            )
        row = view.rollouts.get(samples[0].rollout_digest)
        theirs = [call for call in (view.calls_of(row) if row else ()) if call.call_id in calls and call.trainable]
        outputs = sum(len(unpack_ids(call.output_ids)) for call in theirs)
        if (
            len(theirs) == len(calls) and outputs != tokens
        ):  # a call with several attempts is judged by the token check
            yield Finding(
                WEIGHTS, rollout_id, f"its samples train {tokens} tokens, its calls in them sampled {outputs}"
            )


def _mass(sample: Sample, tokens: int, constants: dict[str, float]) -> float:
    """What a rollout's tokens weigh together, before the divisor."""
    if sample.aggregation is Aggregation.ROLLOUT_MEAN:
        return 1.0
    if sample.aggregation is Aggregation.ROLLOUT_SUM_CONSTANT:
        return tokens * constants.setdefault(
            sample.stages[-1].config_digest if sample.stages else "", sample.loss_weight
        )
    return float(tokens)


def _sampled(sample: Sample) -> int:
    return int(unpack_mask(sample.mask).sum())
