"""Build: exact prefixes, masks from token origin only, weights that no layout changes, and every call accounted for."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.processors.config import BuildConfig
from rollstream.processors.samples import build_group
from rollstream.schemas.identity import digest_ids
from rollstream.schemas.prompts import decode_prompts, encode_prompt
from rollstream.schemas.records import (
    Aggregation,
    Credit,
    CreditScope,
    CreditStatus,
    Delivery,
    Divisor,
    Encoding,
    GroupBuilt,
    GroupCredits,
    LogprobSemantics,
    MaskedCall,
    ModelCall,
    Outcome,
    Reward,
    Rollout,
    Sample,
    VersionSpan,
)
from rollstream.schemas.types import pack_floats, pack_ids, unpack_floats, unpack_ids, unpack_mask
from tests.unit.processors.records import SIGNATURE, a_group, a_rollout, call, conversation, some_credits
from tests.unit.processors.simulation import Simulation, default_pipeline


def build(
    rollouts: Sequence[Rollout], credits: GroupCredits | None = None, **config: Any
) -> tuple[list[Sample], GroupBuilt]:
    """The samples of rollouts with advantages 1, -1, 1, ..."""
    credits = credits or some_credits(rollouts, [1.0 - 2 * (i % 2) for i in range(len(rollouts))])
    return build_group(credits, {r.digest: r for r in rollouts}, BuildConfig(**config), SIGNATURE)


def reasons(built: GroupBuilt) -> dict[str, str]:
    """Masked calls and why."""
    return {masked.call_id: masked.reason for masked in built.masked}


def segments(samples: Sequence[Sample]) -> list[list[str]]:
    """Which calls share a sample."""
    return [[segment.call_id for segment in sample.segments] for sample in samples]


def test_split_makes_one_sample_a_call() -> None:
    """Each call's own prompt and output, and nothing else."""
    calls = conversation(3)

    samples, _ = build([a_rollout(calls=calls)], layout="split")

    prompts, _ = decode_prompts(calls)
    assert [["r-1.c0"], ["r-1.c1"], ["r-1.c2"]] == segments(samples)
    for one, sample in zip(calls, samples, strict=True):
        assert [*prompts[one.call_id], *unpack_ids(one.output_ids)] == list(unpack_ids(sample.ids))
        assert [0] * one.prompt.length + [1] * 3 == list(unpack_mask(sample.mask))


def test_merge_puts_a_linear_conversation_into_one_sample() -> None:
    """Calls that extend each other share a row; what lies between them is context."""
    calls = conversation(3)

    (sample,), built = build([a_rollout(calls=calls)])

    assert [["r-1.c0", "r-1.c1", "r-1.c2"]] == segments([sample])
    assert [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1] == list(unpack_mask(sample.mask))
    assert (9, 9, 9, 1, 0, 1) == (
        sample.sampled_tokens, sample.rollout_tokens, sample.group_tokens, sample.group_rollouts, sample.sample_index,
        sample.rollout_samples,
    )  # fmt: skip
    assert ((sample.sample_id,), ()) == (built.sample_ids, built.masked)


def test_segments_start_where_the_true_prompt_ends() -> None:
    """The ids before a segment are the prompt that its call was conditioned on, by digest."""
    calls = conversation(3)

    (sample,), _ = build([a_rollout(calls=calls)])

    for segment, one in zip(sample.segments, calls, strict=True):
        assert one.prompt.digest == segment.prompt_digest == digest_ids(sample.ids[: 4 * segment.start])
        assert one.output_ids == sample.ids[4 * segment.start : 4 * segment.end]


def test_logprobs_advantages_and_versions_stand_on_their_tokens() -> None:
    """Log-probabilities are NaN and advantages 0 off the mask; version spans move with their tokens."""
    calls = [
        replace(one, output_logprobs=pack_floats([-i - 0.25, -i - 0.5, -i - 0.75]),
                version_spans=(VersionSpan(0, 1, i), VersionSpan(1, 3, i + 1)))
        for i, one in enumerate(conversation(2))
    ]  # fmt: skip
    rollout = a_rollout(calls=calls)

    (sample,), _ = build([rollout], some_credits([rollout], [0.5]))

    nan = math.nan
    expected = [nan] * 4 + [-0.25, -0.5, -0.75] + [nan] * 2 + [-1.25, -1.5, -1.75]
    np.testing.assert_array_equal(np.array(expected, np.float32), unpack_floats(sample.logprobs))
    assert [0, 0, 0, 0, 0.5, 0.5, 0.5, 0, 0, 0.5, 0.5, 0.5] == list(unpack_floats(sample.advantages))
    spans = (VersionSpan(4, 5, 0), VersionSpan(5, 7, 1), VersionSpan(9, 10, 1), VersionSpan(10, 12, 2))
    assert (spans, 0, 2) == (sample.versions, sample.version_min, sample.version_max)


def test_merge_starts_a_new_sample_at_a_branch() -> None:
    """Two calls that continue the same call cannot both extend its row; each sampled token stands once."""
    calls = conversation(2)
    prompts, _ = decode_prompts(calls)
    bases = {calls[0].call_id: np.concatenate([prompts["r-1.c0"], unpack_ids(calls[0].output_ids)])}
    other_prompt = np.concatenate([bases["r-1.c0"], np.array([7, 7, 7], np.uint32)])
    branch = call("branch", 5, prompt=encode_prompt(other_prompt, bases))

    samples, _ = build([a_rollout(calls=[*calls, branch])])

    assert [["r-1.c0", "r-1.c1"], ["branch"]] == segments(samples)


def test_merge_starts_a_new_sample_where_the_prefix_breaks() -> None:
    """A prompt that shares only a part of the row before, as after a compaction, stands alone."""
    calls = conversation(2)
    prompts, _ = decode_prompts(calls)
    bases = {c.call_id: np.concatenate([prompts[c.call_id], unpack_ids(c.output_ids)]) for c in calls}
    cut = encode_prompt(bases["r-1.c1"][:-1], bases)
    assert cut.base_call_id == "r-1.c1"

    samples, _ = build([a_rollout(calls=[*calls, call("cut", 5, prompt=cut)])])

    assert [["r-1.c0", "r-1.c1"], ["cut"]] == segments(samples)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, encoding=Encoding("t", "other", "k", "hermes")),
        lambda one: replace(one, logprob_semantics=LogprobSemantics.RAW),
        lambda one: replace(one, sampling=replace(one.sampling, temperature=0.5)),
        lambda one: replace(one, policy="other"),
    ],
)
def test_merge_keeps_calls_of_different_kinds_apart(change: Any) -> None:
    """A row has one encoding, one meaning of its log-probabilities, one temperature and one policy."""
    first, second, third = conversation(3)

    samples, _ = build([a_rollout(calls=[first, change(second), change(third)])])

    assert [["r-1.c0"], ["r-1.c1", "r-1.c2"]] == segments(samples)


def test_merge_takes_a_masked_call_as_context() -> None:
    """A call behind an untrainable one continues the row before it; the untrainable one's tokens are context there."""
    first, second, third = conversation(3)
    second = replace(second, trainable=False, defects=("logprob_missing",))

    samples, built = build([a_rollout(calls=[first, second, third])])

    assert [["r-1.c0", "r-1.c2"]] == segments(samples)
    assert {"r-1.c1": "logprob_missing"} == reasons(built)
    assert len(unpack_ids(first.output_ids)) + len(unpack_ids(third.output_ids)) == unpack_mask(samples[0].mask).sum()


def test_merge_needs_no_base() -> None:
    """Prompts written whole, as by a gateway that lost its memory, merge like those written as deltas."""
    calls = conversation(3)
    prompts, _ = decode_prompts(calls)
    whole = [replace(c, prompt=encode_prompt(prompts[c.call_id], {})) for c in calls]

    samples, _ = build([a_rollout(calls=whole)])

    assert [["r-1.c0", "r-1.c1", "r-1.c2"]] == segments(samples)


def test_merge_goes_on_after_a_call_that_was_made_again() -> None:
    """A prompt written against an aborted call of the same prompt still continues the row that its ids continue."""
    first, second = conversation(2)
    prompts, _ = decode_prompts([first, second])
    aborted = replace(
        call("aborted", 1, prompt=second.prompt), outcome=Outcome.ABORTED, trainable=False, defects=("not_completed",)
    )
    bases = {"aborted": np.concatenate([prompts[second.call_id], unpack_ids(aborted.output_ids)])}
    again = replace(second, call_index=2, prompt=encode_prompt(prompts[second.call_id], bases))
    assert again.prompt.base_call_id == "aborted"

    samples, _ = build([a_rollout(calls=[first, aborted, again])])

    assert [["r-1.c0", "r-1.c1"]] == segments(samples)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainable": False, "defects": ("version_label", "span_gap")}, "version_label"),
        ({"outcome": Outcome.CLIENT_DISCONNECTED, "trainable": False}, "not_completed"),
        ({"outcome": Outcome.ABORTED, "trainable": False, "defects": ("not_completed",)}, "not_completed"),
        ({"delivered": Delivery.NONE}, "not_delivered"),
        ({"delivered": Delivery.PARTIAL}, "not_delivered"),
        ({"output_ids": b"", "output_logprobs": b"", "version_spans": ()}, "empty_output"),
        ({"output_logprobs": pack_floats([-1.0])}, "token_count_mismatch"),
        ({"output_ids": pack_ids([4, 5])[:-1]}, "token_count_mismatch"),
        ({"output_logprobs": pack_floats([-1.0, math.nan])}, "logprob_missing"),
        ({"version_spans": (VersionSpan(0, 1, 3),)}, "span_gap"),
        ({"version_spans": (VersionSpan(0, 1, 3), VersionSpan(1, 3, 3))}, "span_gap"),
        ({"version_spans": ()}, "span_gap"),
        ({"logprob_semantics": LogprobSemantics.UNKNOWN}, "semantics_unknown"),
    ],
)
def test_call_that_lacks_anything_is_masked_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    """Nothing is padded, cut or guessed: the call is left out as a whole, and named."""
    samples, built = build([a_rollout(calls=[call("c-1", **changes), call("c-2", 1)])])

    assert [["c-2"]] == segments(samples)
    assert {"c-1": reason} == reasons(built)


def test_truncated_and_fully_delivered_calls_are_trained_on() -> None:
    """Reaching the token limit is the policy's own doing."""
    calls = [call("c-1", outcome=Outcome.LENGTH), call("c-2", 1, delivered=Delivery.FULL)]

    samples, built = build([a_rollout(calls=calls)])

    assert [["c-1"], ["c-2"]] == segments(samples)
    assert () == built.masked


def test_call_whose_prompt_cannot_be_known_is_masked() -> None:
    """Without its base, or with a digest that does not fit, no prefix is guessed."""
    first, second, third = conversation(3)
    wrong = replace(third, prompt=replace(third.prompt, digest="0" * 32))

    _, without_base = build([a_rollout(calls=[second])])
    _, with_wrong_digest = build([a_rollout(calls=[first, second, wrong])])

    assert {"r-1.c1": "base_missing"} == reasons(without_base)
    assert {"r-1.c2": "prompt_digest"} == reasons(with_wrong_digest)


def test_lost_calls_are_masked() -> None:
    """A call without an outcome is named."""
    _, built = build([a_rollout(calls=[call("c-1")], lost_call_ids=("c-9",))])

    assert (MaskedCall("c-9", "r-1", "lost"),) == built.masked


def test_call_with_several_attempts_is_judged_by_the_last() -> None:
    """An undelivered attempt and its successful repetition are one call."""
    attempts = [call("c-1", delivered=Delivery.NONE), call("c-1", call_attempt=1, output_ids=pack_ids([8, 9]))]

    samples, built = build([a_rollout(calls=attempts)])
    _, lost = build([a_rollout(calls=attempts[:1], lost_call_ids=("c-1",))])

    assert [8, 9] == list(unpack_ids(samples[0].ids))[-2:]
    assert () == built.masked
    assert {"c-1": "lost"} == reasons(lost)


@pytest.mark.parametrize(
    ("excluded", "reason"),
    [("aborted", "rollout_aborted"), ("group_too_small", "group_too_small"), ("score_missing", "no_reward")],
)
def test_rollout_without_reward_is_masked_with_the_reason(excluded: str, reason: str) -> None:
    """Every call of an excluded rollout says why."""
    rollouts = [a_rollout("r-1", [call("c-1")]), a_rollout("r-2", [call("c-2", rollout_id="r-2")])]
    credits = some_credits(
        rollouts,
        [0.0, 1.0],
        credits=(Credit("r-1", CreditStatus.EXCLUDED, 0.0), Credit("r-2", CreditStatus.OK, 1.0)),
        rewards=(Reward("r-1", (), None, excluded), Reward("r-2", (), 1.0)),
    )

    samples, built = build(rollouts, credits)

    assert [["c-2"]] == segments(samples)
    assert {"c-1": reason} == reasons(built)
    assert (1.0, ("r-1", "r-2")) == (built.mean_reward, built.rollout_ids)


def test_groups_without_baseline_are_masked_and_without_spread_are_built() -> None:
    """Nothing to compare with is no sample; nothing to learn is a sample with advantage 0."""
    rollout = a_rollout(calls=[call("c-1")])
    lone = some_credits([rollout], [1.0], credits=(Credit("r-1", CreditStatus.NO_BASELINE, 0.0),))
    equal = some_credits([rollout], [1.0], credits=(Credit("r-1", CreditStatus.NO_SPREAD, 0.0),))

    no_baseline, no_spread = build([rollout], lone), build([rollout], equal)

    assert ([], {"c-1": "no_baseline"}) == (no_baseline[0], reasons(no_baseline[1]))
    assert (1, {}, False) == (len(no_spread[0]), reasons(no_spread[1]), no_spread[1].has_spread)
    assert {0.0} == set(unpack_floats(no_spread[0][0].advantages))


def test_call_and_token_credits_reach_their_own_tokens() -> None:
    """Narrower scopes differ within a row; a call without a credit is masked."""
    calls = conversation(3)
    rollout = a_rollout(calls=calls)

    def scoped(scope: CreditScope, *credits: Credit) -> GroupCredits:
        return some_credits([rollout], [1.0], scope=scope, credits=credits)

    ok = CreditStatus.OK
    by_call, built = build(
        [rollout], scoped(CreditScope.CALL, Credit("r-1", ok, 2.0, "r-1.c0"), Credit("r-1", ok, 3.0, "r-1.c1"))
    )
    by_token, _ = build(
        [rollout],
        scoped(CreditScope.TOKEN, *(Credit("r-1", ok, v, "r-1.c0", s, e) for v, s, e in ((2.0, 0, 1), (5.0, 1, 3)))),
    )

    assert [2, 2, 2, 0, 0, 3, 3, 3] == list(unpack_floats(by_call[0].advantages))[4:]
    assert {"r-1.c2": "no_reward"} == reasons(built)
    assert [2, 5, 5] == list(unpack_floats(by_token[0].advantages))[4:]


@pytest.mark.parametrize(
    ("aggregation", "constant", "weight", "divisor"),
    [
        ("token_mean", None, 1.0, Divisor.TOKENS),
        ("rollout_mean", None, 1 / 9, Divisor.ROLLOUTS),
        ("rollout_sum_constant", 64, 1 / 64, Divisor.ROLLOUTS),
    ],
)
def test_sample_names_its_weight_and_what_is_left_to_divide_by(
    aggregation: str, constant: float | None, weight: float, divisor: Divisor
) -> None:
    """The weight is per token of the rollout, whatever sample it is in."""
    rollout = a_rollout(calls=conversation(3))

    samples, _ = build([rollout], layout="split", aggregation=aggregation, constant=constant)

    assert {(weight, Aggregation(aggregation), divisor)} == {
        (s.loss_weight, s.aggregation, s.divisor) for s in samples
    }


def test_sample_id_is_a_function_of_lineage_and_configuration() -> None:
    """Equal inputs give equal ids; another layout, credit or call gives another."""
    rollout = a_rollout(calls=conversation(2))

    ids = [
        [sample.sample_id for sample in build([rollout], credits)[0]]
        for credits in (
            some_credits([rollout], [1.0]),
            some_credits([rollout], [1.0]),
            some_credits([rollout], [2.0]),
        )
    ]

    assert ids[0] == ids[1] != ids[2]
    assert 2 == len({sample.sample_id for sample in build([rollout], layout="split")[0]})


def messy(seed: int) -> list[Rollout]:
    """Rollouts with branches, compactions, undelivered, defective and lost calls."""
    rng = random.Random(seed)
    rollouts = []
    for number in range(rng.randint(1, 4)):
        name = f"r-{number}"
        known: dict[str, np.ndarray] = {}
        calls: list[ModelCall] = []
        for index in range(rng.randint(0, 6)):
            start = rng.choice([np.array([1, 2], np.uint32), *known.values(), *list(known.values())[-1:] * 5])
            context = np.array([rng.randrange(9) for _ in range(rng.randrange(3))], np.uint32)
            prompt = np.concatenate([start[: len(start) - (rng.random() < 0.1)], context])
            output = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
            one = call(
                f"{name}.c{index}", index, name, prompt=encode_prompt(prompt, known), output_ids=pack_ids(output)
            )
            one = replace(one, output_logprobs=pack_floats([-1.0] * len(output)),
                          version_spans=(VersionSpan(0, len(output), index),))  # fmt: skip
            if rng.random() < 0.15:
                one = replace(one, trainable=False, defects=("version_label",))
            if rng.random() < 0.1:
                one = replace(one, delivered=Delivery.NONE)
            known[one.call_id] = np.concatenate([prompt, np.array(output, np.uint32)])
            calls.append(one)
        lost = (f"{name}.lost",) if rng.random() < 0.2 else ()
        rollouts.append(a_rollout(name, calls, lost_call_ids=lost, group_size=4))
    return rollouts


@given(st.integers(0, 100_000), st.sampled_from(Aggregation))
def test_layout_changes_no_rollouts_mass_and_loses_no_token(seed: int, aggregation: Aggregation) -> None:
    """Split and merged samples of a rollout have the same mass, hold every trainable token once, and name every call."""
    rollouts = messy(seed)
    constant = 7.0 if aggregation is Aggregation.ROLLOUT_SUM_CONSTANT else None
    masses: list[dict[str, float]] = []

    for layout in ("split", "merge"):
        samples, built = build(rollouts, layout=layout, aggregation=aggregation, constant=constant)
        placed = [*itertools.chain(*segments(samples)), *reasons(built)]
        assert sorted(placed) == sorted(
            [one.call_id for r in rollouts for one in r.calls] + [name for r in rollouts for name in r.lost_call_ids]
        )
        trained = {one.call_id: one for r in rollouts for one in r.calls if one.call_id not in reasons(built)}
        tokens = sum(len(one.output_ids) // 4 for one in trained.values())
        assert tokens == sum(int(unpack_mask(s.mask).sum()) for s in samples)
        assert {tokens} == {s.group_tokens for s in samples} or not samples
        mass: dict[str, float] = {}
        for sample in samples:
            mask = unpack_mask(sample.mask) == 1
            mass[sample.rollout_id] = mass.get(sample.rollout_id, 0.0) + sample.loss_weight * int(mask.sum())
            assert np.isfinite(unpack_floats(sample.logprobs)[mask]).all()
            assert np.isnan(unpack_floats(sample.logprobs)[~mask]).all()
            assert not unpack_floats(sample.advantages)[~mask].any()
            assert int(mask.sum()) == sample.sampled_tokens == sum(span.end - span.start for span in sample.versions)
            for segment in sample.segments:
                one = trained[segment.call_id]
                assert one.prompt.digest == digest_ids(sample.ids[: 4 * segment.start])
                assert one.output_ids == sample.ids[4 * segment.start : 4 * segment.end]
        masses.append(mass)

    assert masses[0].keys() == masses[1].keys()
    assert all(abs(masses[0][r] - masses[1][r]) < 1e-12 for r in masses[0])


@pytest.mark.parametrize("seed", range(8))
def test_stage_builds_a_group_once_in_any_order(seed: int) -> None:
    """Credits before rollouts or after, repeated, with strangers, across restarts: the same records, nothing held."""
    rollouts = [a_rollout(f"r-{i}", conversation(2, rollout_id=f"r-{i}")) for i in range(2)]
    credits = some_credits(rollouts, [1.0, -1.0])
    stranger = a_rollout("r-9")
    simulation = Simulation(default_pipeline(), seed, ["build"])
    for rollout in [*rollouts, stranger, *rollouts]:
        simulation.append("rollouts", rollout)
    for _ in range(2):
        simulation.append("credits", credits)
    for _ in range(3):
        for _ in range(simulation.rng.randrange(10)):
            simulation.step()
        simulation.start()

    simulation.run()

    written = {r.sample_id: r for r in simulation.records("samples") if isinstance(r, Sample)}
    built = [r for r in simulation.records("samples") if isinstance(r, GroupBuilt)]
    assert 1 == len(set(built))
    assert set(built[0].sample_ids) == set(written)
    assert simulation.held() == {}
    assert simulation.dead == {}


def test_stage_writes_the_marker_last() -> None:
    """A reader that has read `GroupBuilt` has the whole group."""
    rollouts = [a_rollout(f"r-{i}", conversation(2, rollout_id=f"r-{i}")) for i in range(2)]
    simulation = Simulation(default_pipeline(), 0, ["build"])
    for noun, record in [*(("rollouts", r) for r in rollouts), ("credits", some_credits(rollouts, [1.0, -1.0]))]:
        simulation.append(noun, record)

    simulation.run()

    assert [Sample, Sample, GroupBuilt] == [type(record) for record in simulation.records("samples")]


def test_stage_rejects_second_credits_with_other_content() -> None:
    """The first credits of a group count; others are kept in the dead letters."""
    rollouts = [a_rollout(f"r-{i}", conversation(1, rollout_id=f"r-{i}")) for i in range(2)]
    simulation = Simulation(default_pipeline(), 0, ["build"])
    simulation.append("credits", some_credits(rollouts, [1.0, -1.0]))
    simulation.append("credits", some_credits(rollouts, [2.0, -2.0]))
    for rollout in rollouts:
        simulation.append("rollouts", rollout)

    simulation.run()
    simulation.tick(0)

    assert ["conflict"] == [reject.reason for reject in simulation.dead.values()]
    assert simulation.held() == {}


def test_empty_group_is_built_without_samples() -> None:
    """A group whose rollouts made no call is accounted for, too."""
    rollout = a_rollout()

    samples, built = build([rollout], some_credits([rollout], [1.0], group=a_group([rollout])))

    assert ([], ()) == (samples, built.sample_ids)
