"""From group to build, in any order, with repetitions, late members and restarts: the rollouts alone decide what is written."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.processors.config import PipelineConfig
from rollstream.processors.ledger import ORPHAN_AFTER_MS
from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.records import Group, GroupBuilt, Record, Rollout, RolloutStatus, Sample
from tests.unit.processors.records import OPENED_MS, a_rollout, conversation, with_reward
from tests.unit.processors.simulation import CODEC, Simulation, default_pipeline

STAGES = ("group", "score", "reward", "credit", "build")
REASONS = {"late_for_group", "group_full", "superseded", "conflict", "not_counted"}
DEADLINE_MS = 600_000
REMEMBERED_MS = 3_600_000
CLOSED_MS = OPENED_MS + 100


@functools.cache
def pipeline(late: str = "dead_letter", counts: tuple[str, ...] = ()) -> Pipeline:
    """The pipeline that ships, with another policy for groups."""
    values = default_pipeline().config.model_dump(mode="json")
    values["group"] |= {"late": late} | ({"counts": counts} if counts else {})
    return Pipeline(PipelineConfig(**values))


@functools.cache
def rollout(
    group: str,
    number: int,
    size: int,
    attempt: int = 0,
    closed_at_ms: int = CLOSED_MS,
    status: RolloutStatus = RolloutStatus.SUCCEEDED,
) -> Rollout:
    """A rollout with one call."""
    name = f"{group}.r-{number}"
    return with_reward(
        name,
        number,
        calls=tuple(conversation(1, rollout_id=name, seed=number)),
        group_id=group,
        group_size=size,
        attempt=attempt,
        closed_at_ms=closed_at_ms + number,
        status=status,
    )


@dataclass(frozen=True)
class Story:
    """Rollouts as they come to the log, before and after the groups' time is over."""

    early: tuple[Rollout, ...]
    """What comes before."""
    late: tuple[Rollout, ...]
    """What comes after."""


@st.composite
def stories(draw: st.DrawFn, *, slow_only: bool = False) -> Story:
    """Up to three groups: with all rollouts, too few or too many, repeated, superseded, failed and late ones.

    Args: slow_only: what comes late also closed late, and no group is full before.
    """
    kinds = ["plain", "slow"] if slow_only else ["plain", "plain", "twice", "retried", "failed", "late", "slow"]
    early: list[Rollout] = []
    late: list[Rollout] = []
    for index in range(draw(st.integers(1, 3))):
        group, size = f"g-{index}", draw(st.integers(2 if slow_only else 1, 3))
        for number in range(size if slow_only else draw(st.integers(1, size + 1))):
            kind = draw(st.sampled_from(kinds)) if number or not slow_only else "plain"
            one = rollout(group, number, size + 1 if slow_only else size)
            if kind == "failed":
                one = rollout(group, number, size, status=RolloutStatus.FAILED)
            if kind == "slow":
                one = rollout(group, number, one.group_size, closed_at_ms=CLOSED_MS + DEADLINE_MS + 5_000)
            is_late = kind == "slow" if slow_only else kind in ("late", "slow") and draw(st.booleans())
            (late if is_late else early).append(one)
            if kind == "twice":
                draw(st.sampled_from([early, late])).append(one)
            if kind == "retried":
                draw(st.sampled_from([early, late])).append(rollout(group, number, size, attempt=1))
    return Story(tuple(draw(st.permutations(early))), tuple(draw(st.permutations(late))))


def play(story: Story, at: Pipeline, seed: int = 0, cuts: Iterable[int] = (), *, is_late: bool = False) -> Simulation:
    """Play a story, with restarts before the steps named by `cuts`; then let time pass until nothing is open.

    Args: is_late: each restart finds what was committed some steps before it.
    """
    simulation = Simulation(at, seed, STAGES, forgets=True)
    steps, waits = itertools.count(), set(cuts)

    def go(limit: int) -> None:
        for _ in range(limit):
            number = next(steps)
            if is_late and number % 7 == 0:
                simulation.commit()
            if number in waits:
                simulation.start(is_late=is_late)
            if not simulation.step():
                return

    for records, now_ms in (
        (story.early, CLOSED_MS + DEADLINE_MS + 1_000),
        (story.late, CLOSED_MS + DEADLINE_MS + 20_000),
        ((), CLOSED_MS + 3 * DEADLINE_MS),
    ):
        for record in records:
            simulation.append("rollouts", record)
            go(simulation.rng.randrange(4))
        go(10_000)
        simulation.run()
        simulation.tick(now_ms)
        simulation.tick(now_ms)
    return simulation


def rest(simulation: Simulation) -> None:
    """Let hours pass."""
    for hours in (2, 3, 4):
        for beyond_ms in (0, ORPHAN_AFTER_MS):
            simulation.tick(CLOSED_MS + hours * REMEMBERED_MS + beyond_ms)


def written(simulation: Simulation) -> dict[tuple[str, ...], str | bytes]:
    """What was derived, by kind and identity. Fails where one identity has two contents."""
    found: dict[tuple[str, ...], str | bytes] = {}

    def note(value: str | bytes, *name: str) -> None:
        assert found.setdefault(name, value) == value, name

    for record in simulation.records("groups"):
        assert isinstance(record, Group)
        note(record.digest, "group", record.group_id, str(record.revision))
    for noun in ("scores", "rewards", "credits"):
        for record in simulation.records(noun):
            group: Group = record.group  # type: ignore[union-attr]
            note(record.digest, noun, group.group_id, str(group.revision))  # type: ignore[union-attr]
    for record in simulation.records("samples"):
        if isinstance(record, Sample):
            note(CODEC.encode(record), "sample", record.sample_id)
        elif isinstance(record, GroupBuilt):
            note(CODEC.encode(record), "built", record.group_id, str(record.group_revision))
    return found


def members(simulation: Simulation) -> dict[str, set[str]]:
    """Digests of all rollouts that were ever in a group, by the group."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in simulation.records("groups"):
        assert isinstance(record, Group)
        found[record.group_id] |= {member.rollout_digest for member in record.members}
    return found


def digest_of(record: Record) -> str:
    """Digest of a rollout."""
    assert isinstance(record, Rollout)
    return record.digest


def check_accounted(simulation: Simulation) -> None:
    """Every rollout is in a group or in a dead letter, with a reason for it, and never in both; nothing is held.

    Build remembers less than group, so what came late after a restart may have a second dead letter.
    """
    rest(simulation)
    inside = set().union(*members(simulation).values())
    buried = {digest_of(letter.event.record) for letter in simulation.letters}
    assert buried | inside == {digest_of(record) for record in simulation.records("rollouts")}
    assert not buried & inside
    late = {letter.event.position for letter in simulation.letters if letter.boundary == "group"}
    assert {letter.reason for letter in simulation.letters if letter.boundary == "group"} <= REASONS
    for letter in simulation.letters:
        assert letter.boundary == "group" or (letter.boundary, letter.reason) == ("build", "already_done")
        assert letter.event.position in late
    assert simulation.held() == {}
    assert not any(hosted.own_held or hosted.remembered for hosted in simulation.hosted)


CUTS = st.lists(st.integers(0, 60), max_size=4)
SEEDS = st.integers(0, 10_000)
POLICIES = st.sampled_from([("dead_letter", ()), ("revision", ()), ("dead_letter", ("succeeded",))])


@settings(max_examples=40)
@given(stories(), POLICIES, SEEDS, CUTS, st.booleans())
def test_chain_writes_the_same_whatever_happens_to_its_processes(
    story: Story, policy: tuple[str, tuple[str, ...]], seed: int, cuts: list[int], is_late: bool
) -> None:
    """Interleaving, acknowledgements and restarts change no digest, lose no rollout and pin no offset."""
    at = pipeline(*policy)

    calm, wild = play(story, at), play(story, at, seed, cuts, is_late=is_late)

    assert written(calm) == written(wild)
    check_accounted(calm)
    check_accounted(wild)


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["full", "short", "retried"])), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
    SEEDS,
    CUTS,
)
def test_chain_writes_the_same_in_any_order_of_rollouts(
    groups: list[tuple[int, str]], random: Any, seed: int, cuts: list[int]
) -> None:
    """A group is the same whoever came first, and however often: full, at its deadline, or with a rollout's second attempt."""
    log = []
    for index, (number, kind) in enumerate(groups):
        size = number if kind == "full" else number + 1
        log += [rollout(f"g-{index}", at, size) for at in range(number)]
        if kind == "retried":
            log.append(rollout(f"g-{index}", 0, size, attempt=1, closed_at_ms=CLOSED_MS + 50))
    mixed = log + random.sample(log, len(log) // 2)
    random.shuffle(mixed)

    calm, wild = play(Story(tuple(log), ()), pipeline()), play(Story(tuple(mixed), ()), pipeline(), seed, cuts)

    assert written(calm) == written(wild)
    assert {letter.reason for letter in wild.letters} <= {"superseded"}
    check_accounted(wild)


@settings(max_examples=20)
@given(stories(slow_only=True), st.sampled_from(["dead_letter", "revision"]), SEEDS)
def test_rebuild_decides_like_the_first_run(story: Story, late: str, seed: int) -> None:
    """Whoever reads all of the log before any time passes makes the groups, and revisions, that were made as it was written."""
    live = play(story, pipeline(late))
    rebuilt = play(Story(story.early + story.late, ()), pipeline(late), seed)

    assert written(live) == written(rebuilt)
    check_accounted(rebuilt)


@pytest.mark.parametrize("late", ["dead_letter", "revision"])
@pytest.mark.parametrize("seed", range(3))
def test_chain_starts_again_when_everything_is_forgotten(late: str, seed: int) -> None:
    """Hours later, after a restart that reads nothing back, new groups are built and old ones are not touched."""
    at = pipeline(late)
    story = Story(tuple(rollout("g-0", number, 3) for number in range(2)), (rollout("g-0", 2, 3),))
    simulation = play(story, at, seed, [9, 23])
    before = written(simulation)
    rest(simulation)
    simulation.start()

    for number in range(2):
        simulation.append("rollouts", rollout("g-9", number, 2))
    simulation.run()

    assert all(cursor > 0 for hosted in simulation.hosted for cursor in hosted.cursors.values())
    assert before.items() <= written(simulation).items()
    assert {("built", "g-9", "0")} == {
        name for name in written(simulation).keys() - before.keys() if name[0] == "built"
    }
    check_accounted(simulation)


@pytest.mark.parametrize("cut", [None, "before", "after"])
@pytest.mark.parametrize("late", ["dead_letter", "revision"])
def test_late_member_has_one_fate_before_and_after_a_restart(cut: str | None, late: str) -> None:
    """By policy a dead letter or a second revision, wherever a restart falls; the first revision stays as it is."""
    simulation = Simulation(pipeline(late), 0, STAGES, forgets=True)
    for number in range(2):
        simulation.append("rollouts", rollout("g-0", number, 3))
    simulation.run()
    simulation.tick(CLOSED_MS + DEADLINE_MS)
    first = written(simulation)
    if cut == "before":
        simulation.start()
    simulation.append("rollouts", rollout("g-0", 2, 3))
    simulation.run()
    if cut == "after":
        simulation.start()
        simulation.run()

    simulation.tick(CLOSED_MS + DEADLINE_MS)

    after = written(simulation)
    assert first.items() <= after.items()
    assert (late == "revision") == (("built", "g-0", "1") in after)
    assert ([] if late == "revision" else ["late_for_group"]) == [letter.reason for letter in simulation.letters]
    assert (3 if late == "revision" else 2) == len(members(simulation)["g-0"])
    check_accounted(simulation)


def test_revision_is_scored_where_it_is_new() -> None:
    """A late member costs its own scorers; its companions' scores are those of the first revision, also after a restart."""
    simulation = Simulation(pipeline("revision"), 0, STAGES, forgets=True)
    for number in range(2):
        simulation.append("rollouts", rollout("g-0", number, 3))
    simulation.run()
    simulation.tick(CLOSED_MS + DEADLINE_MS)
    simulation.start()
    simulation.run()
    simulation.append("rollouts", rollout("g-0", 2, 3))
    started: list[str] = []
    while simulation.step():
        started += [work.key for _, work in simulation.works]

    assert {rollout("g-0", 2, 3).digest} == {key.partition("/")[0] for key in started}
    assert ("built", "g-0", "1") in written(simulation)


def test_failed_siblings_wait_for_replacements() -> None:
    """With `counts: [succeeded]`, a group of two is its two successes, and its failure is in the dead letters once."""
    story = Story((rollout("g-0", 0, 2), rollout("g-0", 1, 2, status=RolloutStatus.FAILED), rollout("g-0", 2, 2)), ())

    simulation = play(story, pipeline("dead_letter", ("succeeded",)), 0, [5, 11])

    assert {rollout("g-0", number, 2).digest for number in (0, 2)} == members(simulation)["g-0"]
    assert {"not_counted"} == {letter.reason for letter in simulation.letters}
    check_accounted(simulation)


def test_group_of_failures_alone_holds_nothing() -> None:
    """Where no rollout counts there is no group, and score and build let go without dead letters of their own."""
    story = Story(tuple(rollout("g-0", number, 2, status=RolloutStatus.FAILED) for number in range(2)), ())

    simulation = play(story, pipeline("dead_letter", ("succeeded",)))

    assert [] == simulation.records("groups")
    assert ["not_counted", "not_counted"] == [letter.reason for letter in simulation.letters]
    check_accounted(simulation)


def test_rollout_of_a_group_that_is_long_done_is_let_go_of() -> None:
    """A late member that comes when score and build have forgotten its group pins no offset."""
    simulation = Simulation(pipeline(), 0, ["score", "build"], forgets=True)
    simulation.append("rollouts", a_rollout("r-9"))
    simulation.run()

    rest(simulation)

    assert {"already_done"} == {letter.reason for letter in simulation.letters}
    assert ["score", "build"] == [letter.boundary for letter in simulation.letters]
    assert simulation.held() == {}
