"""Groups: whole, once, in any interleaving; a position from anywhere loses and doubles none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import TrainerError
from rollstream.schemas.records import GroupBuilt, Sample
from rollstream.trainers.groups import ABANDONED_AFTER_GROUPS, REMEMBERED_GROUPS, GroupAssembler, refusal
from tests.unit.trainers.samples import make_built, make_group, make_sample

Records = list[Sample | GroupBuilt]


def _read(assembler: GroupAssembler, records: Records, start: int = 0) -> list[str]:
    """Read to the end, taking every group at once. Returns: their ids."""
    found = []
    for offset, record in enumerate(records):
        if offset >= start:
            complete = assembler.add(offset, record)
            if complete is not None:
                assembler.take(complete.item)
                found.append(complete.built.group_id)
    return found


def _place(assembler: GroupAssembler) -> tuple[int, list[str]]:
    position = assembler.position()
    return position["offset"], position["done"]


def test_group_is_complete_with_its_marker() -> None:
    """Samples wait for the record that names them all."""
    assembler = GroupAssembler(0)
    records = make_group("g", 2)

    found = [assembler.add(offset, record) for offset, record in enumerate(records)]

    assert [None, None] == found[:2]
    assert found[2] is not None
    assert ("g-0", "g-1") == tuple(sample.sample_id for sample in found[2].samples)


def test_samples_come_in_the_order_of_the_marker() -> None:
    """The log may hold them in another one."""
    assembler = GroupAssembler(0)
    a, b, built = make_group("g", 2)

    complete = [assembler.add(i, record) for i, record in enumerate([b, a, built])][-1]

    assert complete is not None
    assert complete.samples == (a, b)


def test_group_that_stands_twice_comes_once() -> None:
    """A builder that restarted writes the same group again."""
    records = make_group("g") + make_group("h") + make_group("g")

    assert ["g", "h"] == _read(GroupAssembler(0), records)


def test_half_written_group_that_is_written_again_comes_once_and_whole() -> None:
    """The first half is of a builder that died."""
    whole = make_group("g", 3)
    assembler = GroupAssembler(0)

    assert ["g"] == _read(assembler, whole[:2] + whole)


def test_group_of_two_pipelines_is_two_groups() -> None:
    """The same rollouts, built by other rules."""
    one = [make_sample("s", group_id="g"), make_built("g", ("s",))]
    other = [make_sample("t", group_id="g", pipeline_digest="q"), make_built("g", ("t",), pipeline_digest="q")]

    assert ["g", "g"] == _read(GroupAssembler(0), one + other)


def test_cut_group_at_the_beginning_comes_without_samples() -> None:
    """Retention may have taken some of its samples; it says so and is no error."""
    records = make_group("g", 2)
    assembler = GroupAssembler(0)

    assembler.add(5, records[1])
    complete = assembler.add(6, records[2])

    assert complete is not None
    assert complete.is_cut
    assert complete.samples == ()


def test_cut_group_after_a_position_is_an_error() -> None:
    """A position of ours is never inside a group."""
    records = make_group("g", 2)
    assembler = GroupAssembler(3)
    assembler.seek({"offset": 1, "done": []})
    assembler.add(1, records[1])

    with pytest.raises(TrainerError, match=r"partition 3 offset 2 names 2 samples, and 1 .* for instance 'g-0'"):
        assembler.add(2, records[2])


def test_cut_group_stays_a_cut_group_over_a_checkpoint() -> None:
    """Reading began inside a group, and the trainer stopped before the group's record came: that is no error later on."""
    records = make_group("g", 2)
    before = GroupAssembler(0)
    before.add(5, records[1])
    after = GroupAssembler(0)
    start = after.seek(json.loads(json.dumps(before.position())))

    complete = [after.add(start, records[1]), after.add(start + 1, records[2])][-1]

    assert complete is not None
    assert complete.is_cut


def test_samples_without_a_record_do_not_hold_the_position_for_ever() -> None:
    """Half a group of a builder that died, and whose successor has another pipeline."""
    assembler = GroupAssembler(0)
    assembler.add(0, make_sample("orphan", group_id="half"))
    last = ABANDONED_AFTER_GROUPS + 1

    for number in range(1, last + 1):
        complete = assembler.add(number, make_built(f"g-{number}", ()))
        assert complete is not None
        assembler.take(complete.item)

    assert last + 1 == assembler.position()["offset"]


def test_no_group_comes_twice_behind_samples_without_a_record() -> None:
    """Wherever the position is held, all groups behind it are remembered."""
    records: Records = [make_sample("orphan", group_id="half")]
    records += [make_built(f"g-{number}", ()) for number in range(REMEMBERED_GROUPS + 10)]
    assembler = GroupAssembler(0)
    _read(assembler, records)
    again = GroupAssembler(0)

    start = again.seek(json.loads(json.dumps(assembler.position())))

    assert [] == _read(again, records, start)


def test_position_waits_for_groups_that_were_not_taken() -> None:
    """A group in a buffer is not trained on yet."""
    assembler = GroupAssembler(0)
    for offset, record in enumerate(make_group("g") + make_group("h")):
        assembler.add(offset, record)

    assert (0, []) == _place(assembler)
    assembler.take("g/0/p")
    assert (3, ["g/0/p"]) == _place(assembler)
    assembler.take("h/0/p")
    assert 6 == assembler.position()["offset"]


def test_only_the_last_groups_are_remembered() -> None:
    """The position stays small."""
    assembler = GroupAssembler(0)

    for number in range(REMEMBERED_GROUPS + 10):
        assembler.take(f"g-{number}")

    assert REMEMBERED_GROUPS == len(assembler.position()["done"])


@given(
    order=st.permutations([i for i in range(5) for _ in range(4)]),
    stops=st.lists(st.integers(0, 40), max_size=4),
    doubled=st.lists(st.integers(0, 4), max_size=3),
)
def test_each_group_comes_once_whatever_the_interleaving_and_restarts(
    order: list[int], stops: list[int], doubled: list[int]
) -> None:
    """Five groups interleaved, some written twice, the trainer restarting from its checkpoint at any time."""
    waiting = {i: make_group(f"g{i}", 3) for i in range(5)}
    records: Records = [waiting[i].pop(0) for i in order]
    for i in doubled:
        records += make_group(f"g{i}", 3)
    assembler = GroupAssembler(0)
    trained: list[str] = []
    checkpoint = json.dumps(assembler.position())
    start = 0
    for stop in [*sorted(stops), len(records)]:
        trained += _read(assembler, records[:stop], start)
        checkpoint = json.dumps(assembler.position())
        assembler = GroupAssembler(0)
        start = assembler.seek(json.loads(checkpoint))

    assert sorted(f"g{i}" for i in range(5)) == sorted(trained)


def test_group_with_an_unreadable_record_is_complete_without_samples() -> None:
    """It is skipped with a reason, once, wherever reading began; other groups are whole."""
    broken, whole = make_group("g", 3), make_group("h")
    assembler = GroupAssembler(0)
    assembler.seek({"offset": 0, "done": []})
    assembler.add(0, broken[0])
    assembler.add_unreadable(1, "g")
    found = [assembler.add(offset, record) for offset, record in enumerate([*broken[2:], *whole], 2)]

    complete = [one for one in found if one is not None]

    assert [("g", True, 0), ("h", False, 2)] == [
        (one.built.group_id, one.is_unreadable, len(one.samples)) for one in complete
    ]
    assert ["unreadable", None] == [refusal(one, policy="default", version=5) for one in complete]


def test_unreadable_record_is_not_passed_before_its_group_is() -> None:
    """A trainer that stops between the two finds the reason again, not a group that was cut."""
    records = make_group("g", 2)
    before = GroupAssembler(0)
    before.seek({"offset": 0, "done": []})
    before.add_unreadable(0, "g")
    after = GroupAssembler(0)

    start = after.seek(json.loads(json.dumps(before.position())))

    assert 0 == start
    after.add_unreadable(0, "g")
    after.add(1, records[1])
    complete = after.add(2, records[2])
    assert complete is not None
    assert complete.is_unreadable
    after.take(complete.item)
    assert 3 == after.position()["offset"]


def test_group_that_is_whole_in_spite_of_an_unreadable_record_is_handed_out() -> None:
    """A builder that restarted wrote the unreadable sample again."""
    assembler = GroupAssembler(0)
    assembler.add_unreadable(0, "g")

    assert ["g"] == _read(assembler, [*make_group("x"), *make_group("g")], 3)


def test_unreadable_record_does_not_hold_the_position_for_ever() -> None:
    """It may have been the record that ends its group."""
    assembler = GroupAssembler(0)
    assembler.add_unreadable(0, "g")
    last = ABANDONED_AFTER_GROUPS + 1

    for number in range(1, last + 1):
        complete = assembler.add(number, make_built(f"g-{number}", ()))
        assert complete is not None
        assembler.take(complete.item)

    assert last + 1 == assembler.position()["offset"]


def test_later_revisions_are_for_who_asks_for_them() -> None:
    """Their first members were handed out with the first revision."""
    records = [replace(record, group_revision=1) for record in make_group("g")]
    assembler = GroupAssembler(0)

    complete = [assembler.add(offset, record) for offset, record in enumerate(records)][-1]

    assert complete is not None
    assert "revision" == refusal(complete, policy="default", version=5)
    assert refusal(complete, policy="default", version=5, revisions=True) is None
