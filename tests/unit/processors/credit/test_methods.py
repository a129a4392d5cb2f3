"""Credit methods: published numbers, invariances, and the edges where public implementations disagree."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.processors.credit import METHODS, CreditResult
from rollstream.schemas.records import CreditStatus, Reward
from tests.unit.processors.records import a_group, a_rollout

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CASES = VECTORS["cases"]
REWARDS = st.lists(st.integers(-8, 8).map(lambda i: i / 4), min_size=2, max_size=12)
SPREAD_REWARDS = REWARDS.filter(lambda values: len(set(values)) > 1)


def credit(method: str, values: Sequence[float | None], **config: Any) -> CreditResult:
    """What a method says about a group with these rewards."""
    found = METHODS[method]
    rewards = [Reward(f"r-{i:02}", (), value) for i, value in enumerate(values)]
    group = a_group([a_rollout(reward.rollout_id) for reward in rewards])
    return found.run(group, rewards, found.config(**config))


def advantages(result: CreditResult) -> list[float]:
    """The values, in order."""
    return [one.value for one in result.credits]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['method']}-{case['config']}")
def test_method_gives_the_reference_numbers(case: dict[str, Any]) -> None:
    """Same numbers as an independent implementation that was compared with the public ones."""
    result = credit(case["method"], VECTORS["rewards"], **case["config"])

    assert pytest.approx(case["advantages"], abs=1e-12) == advantages(result)
    assert {CreditStatus.OK} == {one.status for one in result.credits}


@pytest.mark.parametrize("method", METHODS)
@given(values=SPREAD_REWARDS, seed=st.integers(0, 99))
def test_method_does_not_depend_on_the_order_of_rewards(method: str, values: list[float], seed: int) -> None:
    """Members in another order get the same bits, sorted by id."""
    found = METHODS[method]
    rewards = [Reward(f"r-{i:02}", (), value) for i, value in enumerate(values)]
    mixed = random.Random(seed).sample(rewards, len(rewards))
    group = a_group([a_rollout()])

    results = [found.run(group, order, found.config()) for order in (rewards, mixed)]

    assert results[0] == results[1]


@pytest.mark.parametrize("method", METHODS)
@given(values=REWARDS)
def test_method_sums_to_zero(method: str, values: list[float]) -> None:
    """What one rollout gains the others lose."""
    assert abs(math.fsum(advantages(credit(method, values)))) < 1e-9


@given(values=SPREAD_REWARDS)
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(values: list[float]) -> None:
    """Leaving oneself out of the mean only changes the scale."""
    n = len(values)

    expected = [n / (n - 1) * value for value in advantages(credit("dr_grpo", values))]

    assert pytest.approx(expected, abs=1e-12) == advantages(credit("rloo", values))


@given(values=SPREAD_REWARDS, scale=st.floats(0.1, 50), shift=st.floats(-50, 50))
def test_grpo_does_not_change_with_an_affine_map_of_the_rewards(
    values: list[float], scale: float, shift: float
) -> None:
    """Neither unit nor zero point of the reward matters."""
    mapped = [scale * value + shift for value in values]

    assert pytest.approx(advantages(credit("grpo", values, eps=0.0)), abs=1e-6) == advantages(
        credit("grpo", mapped, eps=0.0)
    )


@given(values=SPREAD_REWARDS, shift=st.integers(-50, 50))
def test_dr_grpo_does_not_change_with_a_shift_of_the_rewards(values: list[float], shift: int) -> None:
    """The zero point of the reward does not matter."""
    assert pytest.approx(advantages(credit("dr_grpo", values)), abs=1e-12) == advantages(
        credit("dr_grpo", [value + shift for value in values])
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("values", [[0.1] * 3, [1.0, 1.0], [0.1, 0.1 + 5e-10]])
def test_method_gives_exactly_zero_without_spread(method: str, values: list[float]) -> None:
    """Equal rewards, and such as differ by rounding, teach nothing; the noise is not scaled up."""
    result = credit(method, values)

    assert [(CreditStatus.NO_SPREAD, 0.0)] * len(values) == [(one.status, one.value) for one in result.credits]


@pytest.mark.parametrize("method", METHODS)
def test_method_has_no_baseline_for_a_lone_reward(method: str) -> None:
    """A rollout that nothing can be compared with is not trained on."""
    result = credit(method, [1.0])

    assert [(CreditStatus.NO_BASELINE, 0.0)] == [(one.status, one.value) for one in result.credits]


@pytest.mark.parametrize(("method", "expected"), [("grpo", 1 / (1 + 1e-6)), ("dr_grpo", 1.0), ("rloo", 1.0)])
def test_method_may_take_a_lone_reward_as_it_is(method: str, expected: float) -> None:
    """The choice of verl, for comparison."""
    result = credit(method, [1.0], singleton="reward")

    assert [(CreditStatus.OK, expected)] == [(one.status, one.value) for one in result.credits]


@pytest.mark.parametrize("method", METHODS)
def test_method_leaves_rollouts_without_a_reward_out_of_everything(method: str) -> None:
    """A missing reward is excluded and changes no other rollout's advantage; it is never 0."""
    result = credit(method, [1.0, None, 0.0, 0.5])

    assert CreditStatus.EXCLUDED is result.credits[1].status
    assert advantages(credit(method, [1.0, 0.0, 0.5])) == [result.credits[i].value for i in (0, 2, 3)]
    assert 3 == result.statistics.count


@pytest.mark.parametrize("method", METHODS)
def test_method_makes_something_of_a_group_without_rewards(method: str) -> None:
    """A group in which every score is missing is excluded as a whole."""
    result = credit(method, [None, None])

    assert [CreditStatus.EXCLUDED] * 2 == [one.status for one in result.credits]
    assert 0 == result.statistics.count


def test_grpo_with_leave_one_out_does_not_divide_where_the_others_are_equal() -> None:
    """With two rollouts, the other one has no deviation: the difference stays."""
    assert [1.0, -1.0] == advantages(credit("grpo", [1.0, 0.0], center="loo", scale="loo_std"))


def test_statistics_allow_groups_to_be_merged_into_a_batch() -> None:
    """Count, mean and m2 of two groups give those of both together (Chan)."""
    a, b, both = (
        credit("grpo", values).statistics for values in ([1.0, 0.0], [0.5, 3.0, 2.0], [1.0, 0.0, 0.5, 3.0, 2.0])
    )

    delta = b.mean - a.mean
    m2 = a.m2 + b.m2 + delta**2 * a.count * b.count / (a.count + b.count)

    assert pytest.approx(both.m2) == m2
    assert pytest.approx(math.sqrt(both.m2 / 4)) == both.std
