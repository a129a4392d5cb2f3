"""Group: full, timeout or partial; the order of arrival does not matter, and nobody is dropped silently."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.schemas.records import Group, GroupClose, MissingMember, Rollout, RolloutStatus
from tests.unit.processors.records import OPENED_MS, a_rollout, call
from tests.unit.processors.simulation import Simulation, default_pipeline

PIPELINE = default_pipeline()
CLOSED_MS = OPENED_MS + 100
DEADLINE_MS = CLOSED_MS + 600_000


def group(*rollouts: Rollout, tick_ms: int | None = None, seed: int = 0) -> Simulation:
    """Give rollouts to group, in this order."""
    simulation = Simulation(PIPELINE, seed, ["group"])
    for rollout in rollouts:
        simulation.append("rollouts", rollout)
    simulation.run()
    if tick_ms is not None:
        simulation.tick(tick_ms)
    simulation.tick(0)
    return simulation


def groups(simulation: Simulation) -> list[Group]:
    """What group wrote."""
    return [record for record in simulation.records("groups") if isinstance(record, Group)]


def some(number: int, size: int = 4, **changes: Any) -> list[Rollout]:
    """Rollouts of a group, with different closing times."""
    return [
        a_rollout(f"r-{i}", [call(f"c-{i}")], group_size=size, closed_at_ms=CLOSED_MS + i, **changes)
        for i in range(number)
    ]


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), max_size=4))
def test_group_is_the_same_in_any_order_of_arrival(order: list[int], repeated: list[int]) -> None:
    """A full group's members, closing and digest do not depend on who came first or twice."""
    rollouts = some(4)

    simulation = group(*[rollouts[at] for at in order], *[rollouts[at] for at in repeated])

    assert groups(group(*rollouts)) == groups(simulation)
    assert simulation.held() == {}
    assert simulation.dead == {}


def test_group_closes_when_full() -> None:
    """The last rollout closes the group, at the latest of their times, with members sorted by id."""
    (record,) = groups(group(*reversed(some(4))))

    assert (GroupClose.FULL, CLOSED_MS + 3, ()) == (record.closed_by, record.closed_at_ms, record.missing)
    assert ["r-0", "r-1", "r-2", "r-3"] == [member.rollout_id for member in record.members]
    assert [(1, 2)] * 4 == [(member.num_calls, member.trainable_tokens) for member in record.members]


@pytest.mark.parametrize(("number", "closed_by"), [(3, GroupClose.TIMEOUT), (1, GroupClose.PARTIAL)])
def test_group_closes_at_its_deadline(number: int, closed_by: GroupClose) -> None:
    """Event time of the first rollout's closing plus the deadline; too few rollouts make it partial."""
    before = group(*some(number), tick_ms=DEADLINE_MS - 1)
    after = group(*some(number), tick_ms=DEADLINE_MS)

    assert groups(before) == []
    (record,) = groups(after)
    assert (closed_by, DEADLINE_MS) == (record.closed_by, record.closed_at_ms)
    assert (MissingMember("not_in_time"),) * (4 - number) == record.missing


def test_group_rejects_a_rollout_that_comes_after_the_close() -> None:
    """A late rollout is kept in the dead letters."""
    simulation = group(*some(3), tick_ms=DEADLINE_MS)
    late = a_rollout("r-9", group_size=4)
    simulation.append("rollouts", late)

    simulation.run()

    assert ["late_for_group"] == [reject.reason for reject in simulation.dead.values()]
    assert 1 == len(groups(simulation))
    assert simulation.held() == {}


def test_group_decides_the_same_when_a_late_rollout_is_read_before_the_deadline_passes() -> None:
    """A rollout that closed after the deadline is no member, even if a rebuild reads it in time."""
    late = a_rollout("r-9", group_size=4, closed_at_ms=DEADLINE_MS + 1)

    (record,) = groups(rebuilt := group(*some(3), late))

    assert GroupClose.TIMEOUT is record.closed_by
    assert (MissingMember("late_for_group", "r-9"),) == record.missing
    assert ["late_for_group"] == [reject.reason for reject in rebuilt.dead.values()]
    assert rebuilt.held() == {}


def test_group_rejects_the_same_rollout_with_other_content() -> None:
    """Two contents of one rollout attempt: the first stays, the second is kept as a conflict."""
    first, second = some(2, size=2)
    other = a_rollout("r-0", group_size=2, status=RolloutStatus.FAILED)

    simulation = group(first, other, second)

    assert first.digest == groups(simulation)[0].members[0].rollout_digest
    assert ["conflict"] == [reject.reason for reject in simulation.dead.values()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_group_counts_a_rollout_once_with_its_highest_attempt(order: tuple[int, int]) -> None:
    """A repeated rollout fills one place; its lower attempt is kept in the dead letters."""
    attempts = [a_rollout("r-0", attempt=0, status=RolloutStatus.ABORTED), a_rollout("r-0", attempt=1)]

    simulation = group(attempts[order[0]], attempts[order[1]], a_rollout("r-1"))

    assert [("r-0", 1), ("r-1", 0)] == [(m.rollout_id, m.attempt) for m in groups(simulation)[0].members]
    assert ["superseded"] == [reject.reason for reject in simulation.dead.values()]
    assert simulation.held() == {}


def test_group_of_one_is_full_at_once() -> None:
    """A rollout without companions is a group, which credit then cannot compare."""
    assert GroupClose.FULL is groups(group(a_rollout(group_size=1)))[0].closed_by


@pytest.mark.parametrize("seed", range(8))
def test_group_survives_restarts(seed: int) -> None:
    """Read again from what was committed, a group is written with the same digest and late ones stay late."""
    simulation = Simulation(PIPELINE, seed, ["group"])
    for rollout in [*some(2, size=2), a_rollout("r-9"), *some(2, size=2)]:
        simulation.append("rollouts", rollout)
    for _ in range(3):
        for _ in range(simulation.rng.randrange(8)):
            simulation.step()
        simulation.start()

    simulation.run()
    simulation.tick(0)

    assert 1 == len({record.digest for record in groups(simulation)})
    assert ["late_for_group"] == [reject.reason for reject in simulation.dead.values()]
    assert simulation.held() == {}
