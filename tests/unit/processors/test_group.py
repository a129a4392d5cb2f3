"""Group: full, timeout or partial; the order of arrival does not matter, and nobody is dropped silently."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.processors.base import Stage
from rollstream.processors.config import PipelineConfig
from rollstream.processors.ledger import ORPHAN_AFTER_MS
from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.records import Group, GroupClose, MissingMember, Rollout, RolloutStatus
from tests.unit.processors.records import OPENED_MS, a_rollout, call
from tests.unit.processors.simulation import CODEC, Simulation, an_event, default_pipeline

PIPELINE = default_pipeline()
CLOSED_MS = OPENED_MS + 100
DEADLINE_MS = CLOSED_MS + 600_000


def with_policy(**values: Any) -> Pipeline:
    """The pipeline that ships, with other keys in its group part."""
    config = PIPELINE.config.model_dump(mode="json")
    config["group"] |= values
    return Pipeline(PipelineConfig(**config))


def group(*rollouts: Rollout, tick_ms: int | None = None, seed: int = 0, at: Pipeline = PIPELINE) -> Simulation:
    """Give rollouts to group, in this order."""
    simulation = Simulation(at, seed, ["group"])
    for rollout in rollouts:
        simulation.append("rollouts", rollout)
    simulation.run()
    if tick_ms is not None:
        simulation.tick(tick_ms)
    simulation.tick(0)
    return simulation


def more(simulation: Simulation, *rollouts: Rollout) -> list[tuple[int, str]]:
    """Give further rollouts. Returns: offset and reason of all dead letters."""
    for rollout in rollouts:
        simulation.append("rollouts", rollout)
    simulation.run()
    simulation.tick(0)
    return [(letter.event.position.offset, letter.reason) for letter in simulation.letters]


def stage_of(at: Pipeline = PIPELINE) -> Stage:
    """The group stage alone."""
    return at.build_stages(0)[1]


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

    rebuilt = group(*some(3), late, tick_ms=DEADLINE_MS)

    assert groups(group(*some(3), tick_ms=DEADLINE_MS)) == groups(rebuilt)
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
    """Read again from what was committed, a group is written with the same digest, and who found no place still finds none."""
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
    assert ["group_full"] == [reject.reason for reject in simulation.dead.values()]
    assert simulation.held() == {}


@pytest.mark.parametrize("seed", range(12))
def test_group_believes_its_log_and_not_the_half_that_it_reads_again(seed: int) -> None:
    """Read again from the middle, a full group takes in another rollout, until its own output says who its members are."""
    first, second, other = a_rollout("r-1"), a_rollout("r-2"), a_rollout("r-3")
    simulation = Simulation(PIPELINE, seed, ["group"], forgets=True)
    for rollout in (first, a_rollout("r-open", group_id="g-open"), second):
        simulation.append("rollouts", rollout)
    simulation.run()
    simulation.start()

    letters = more(simulation, other)

    assert 1 == simulation.committed["rollouts"]
    assert {(first.digest, second.digest)} == {
        tuple(member.rollout_digest for member in record.members) for record in groups(simulation)
    }
    assert [(3, "group_full")] == letters


def test_group_tells_a_full_group_from_a_late_member_and_a_conflict() -> None:
    """After the close: no place was free, the time was over, or the attempt is in with other content."""
    full = group(*some(2, size=2))
    over = group(*some(2, size=3), tick_ms=DEADLINE_MS)
    twin = a_rollout("r-0", group_size=3, status=RolloutStatus.FAILED)

    assert [(2, "group_full")] == more(full, a_rollout("r-9"))
    assert [(2, "late_for_group"), (3, "conflict")] == more(over, a_rollout("r-9", group_size=3), twin)


def test_group_closes_on_a_rollout_that_counts() -> None:
    """With `counts: [succeeded]` a failed rollout fills no place, and another one does."""
    failed = a_rollout("r-0", status=RolloutStatus.FAILED)
    good = [a_rollout("r-1"), a_rollout("r-2")]

    simulation = group(failed, *good, at=with_policy(counts=["succeeded"]))

    (record,) = groups(simulation)
    assert (GroupClose.FULL, ["r-1", "r-2"]) == (record.closed_by, [member.rollout_id for member in record.members])
    assert [(0, "not_counted")] == [(at.offset, reject.reason) for at, reject in simulation.dead.items()]


def test_order_of_counts_changes_no_digest() -> None:
    """Two files that mean the same have the same digest."""
    one, other = with_policy(counts=["failed", "succeeded"]), with_policy(counts=["succeeded", "failed"])

    assert one.digest == other.digest != PIPELINE.digest


def test_revision_names_all_members_and_leaves_the_first_as_it_was() -> None:
    """Each late member makes the next revision, sorted, until the group is full; who comes then finds no place."""
    simulation = group(*some(2, size=4), tick_ms=DEADLINE_MS, at=with_policy(late="revision"))
    (first,) = groups(simulation)
    late = [a_rollout(name, group_size=4, closed_at_ms=DEADLINE_MS + 5) for name in ("r-00", "r-9", "r-99")]

    letters = more(simulation, *late)

    kept, second, third = groups(simulation)
    assert first == kept
    assert (1, GroupClose.TIMEOUT, ["r-0", "r-00", "r-1"], 1) == (
        second.revision, second.closed_by, [member.rollout_id for member in second.members], len(second.missing),
    )  # fmt: skip
    assert (2, GroupClose.FULL, ["r-0", "r-00", "r-1", "r-9"], DEADLINE_MS + 5) == (
        third.revision, third.closed_by, [member.rollout_id for member in third.members], third.closed_at_ms,
    )  # fmt: skip
    assert [(4, "group_full")] == letters


def test_revision_ends_when_its_time_is_over() -> None:
    """A rollout that closed too long after its group, or comes when nobody keeps its rollouts any more, is late."""
    policy = with_policy(late="revision", revise_within_s=10)
    slow, fast = (a_rollout(f"r-{name}", group_size=4, closed_at_ms=DEADLINE_MS + name) for name in (10_001, 5))

    in_time = group(*some(2), tick_ms=DEADLINE_MS, at=policy)
    final = group(*some(2), tick_ms=DEADLINE_MS, at=policy)
    final.tick(DEADLINE_MS + 10_000 + ORPHAN_AFTER_MS)

    assert [(2, "late_for_group")] == more(in_time, slow, fast)
    assert [0, 1] == [record.revision for record in groups(in_time)]
    assert [(2, "late_for_group")] == more(final, fast)


def test_second_attempt_of_a_member_makes_no_revision() -> None:
    """The group was closed with the first one."""
    simulation = group(*some(2), tick_ms=DEADLINE_MS, at=with_policy(late="revision"))

    assert [(2, "late_for_group")] == more(simulation, a_rollout("r-0", attempt=1, group_size=4))


def test_group_forgets_when_it_is_told_to() -> None:
    """What the shell will not read back any more is a new group when it comes again."""
    stage = stage_of()
    rollout = a_rollout(group_size=1)
    stage.apply(an_event(rollout, "rollouts", 0))
    stage.item_done("g-1/0")
    repeated = stage.apply(an_event(rollout, "rollouts", 1))

    stage.forget("g-1/0")

    assert 1 == len(repeated.finished)
    assert ["g-1/0"] == [emit.item for emit in stage.apply(an_event(rollout, "rollouts", 2)).emits]


def test_huge_group_decodes_each_rollout_once() -> None:
    """Ten thousand rollouts make one group, and nothing is decoded again or stays decoded."""
    stage, size, decoded = stage_of(), 10_000, 0
    events = [an_event(a_rollout(f"r-{i}", group_size=size), "rollouts", i) for i in range(size)]

    def decode(value: bytes) -> Any:
        nonlocal decoded
        decoded += 1
        return CODEC.decode(value)

    emits = []
    for event in events:
        event._decode = decode
        emits += stage.apply(event).emits
        event.thin()
    released = stage.item_done("g-1/0")

    (emit,) = emits
    assert size == len(emit.records[0].members)  # type: ignore[union-attr]
    assert size == len(released) == len(emit.used)
    assert 0 == decoded


def test_ten_thousand_open_groups_close_at_their_deadlines() -> None:
    """Each at its own time, whatever else is open."""
    stage, number = stage_of(), 10_000
    for i in range(number):
        event = an_event(a_rollout(group_id=f"g-{i}", closed_at_ms=CLOSED_MS + i), "rollouts", i)
        assert () == stage.apply(event).emits

    closed = [len(stage.tick(DEADLINE_MS + now_ms).emits) for now_ms in range(number)]

    assert [1] * number == closed
