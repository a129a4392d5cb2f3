"""The schedule of faults: pure, complete, and never two victims of one lane at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.faults import ACTS
from chaos.schedule import GROUPS, KINDS, Fault, ScheduleTooShort, make_schedule

SECONDS = st.floats(min_value=90, max_value=1800)
SEEDS = st.integers(min_value=0, max_value=2**32)


@given(SEEDS, SECONDS)
def test_schedule_is_the_same_for_the_same_seed(seed: int, seconds: float) -> None:
    """A run that found something can be run again."""
    first = make_schedule(seed, seconds)

    again = make_schedule(seed, seconds)

    assert first == again


@given(SEEDS, SECONDS)
def test_schedule_holds_every_kind(seed: int, seconds: float) -> None:
    """No kind of fault is left to chance."""
    faults = make_schedule(seed, seconds)

    assert {fault.kind for fault in faults} == {kind.name for kind in KINDS}


@given(SEEDS, SECONDS)
def test_schedule_gives_a_lane_a_rest_between_two_faults(seed: int, seconds: float) -> None:
    """Nobody suffers two faults at once, and of all brokers together only one."""
    faults = make_schedule(seed, seconds)

    for name, group in GROUPS.items():
        for lane in group.lanes:
            own = [fault for fault in faults if fault.group == name and fault.target in lane]
            assert all(_end_s(one) + group.rest_s <= other.begin_s + 0.01 for one, other in pairwise(own))


@given(SEEDS, SECONDS)
def test_schedule_is_over_in_time_and_in_order(seed: int, seconds: float) -> None:
    """The last fault is taken back before the end; numbers follow the begins."""
    faults = make_schedule(seed, seconds)

    assert all(_end_s(fault) <= seconds for fault in faults)
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    assert [fault.begin_s for fault in faults] == sorted(fault.begin_s for fault in faults)


@given(SEEDS)
def test_schedule_of_thirty_minutes_has_two_hundred_faults(seed: int) -> None:
    """The long run is as hard as it says."""
    faults = make_schedule(seed, 30 * 60)

    assert len(faults) >= 200


def test_schedules_of_two_seeds_differ() -> None:
    """The seed decides something."""
    assert make_schedule(1, 300) != make_schedule(2, 300)


def test_schedule_leaves_out_what_is_not_possible() -> None:
    """Where nobody can be cut off, nobody is."""
    possible = [kind for kind in KINDS if "partition" not in kind.name]

    faults = make_schedule(1, 300, possible)

    assert {fault.kind for fault in faults} == {kind.name for kind in possible}


def test_schedule_refuses_too_little_time() -> None:
    """A run that cannot hold every kind would prove less than it says."""
    with pytest.raises(ScheduleTooShort, match="seconds=20"):
        make_schedule(1, 20)


def test_every_kind_has_an_act() -> None:
    """What is planned can be done, and nothing else can."""
    assert {kind.name for kind in KINDS} == set(ACTS)


def _end_s(fault: Fault) -> float:
    return fault.begin_s + fault.lasts_s
