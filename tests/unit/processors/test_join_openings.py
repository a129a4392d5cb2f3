"""Join begins a rollout with its opening: what comes without one waits, and is never made a second rollout of."""

from __future__ import annotations

import pytest

from rollstream.processors.base import Event, Step
from rollstream.processors.join import JoinStage
from rollstream.processors.ledger import ORPHAN_AFTER_MS
from rollstream.schemas.records import Record, Rollout, RolloutStatus
from tests.unit.processors.joining import DEADLINE_MS, PIPELINE, barrier, join, reasons, rollouts
from tests.unit.processors.records import OPENED_MS, call, happened, opened, started, terminal
from tests.unit.processors.simulation import an_event

WHOLE: list[tuple[str, Record]] = [
    ("calls", opened()),
    ("calls", started(call("c-1"))),
    ("calls", call("c-1")),
    ("environment", happened("e-1")),
    *barrier(expected_calls=1, expected_events=1),
]


def events(entries: list[tuple[str, Record]]) -> list[Event]:
    """Entries as events, numbered by topic."""
    logs: dict[str, int] = {}
    made = []
    for noun, record in entries:
        made.append(an_event(record, noun, logs.setdefault(noun, 0)))
        logs[noun] += 1
    return made


def a_join() -> JoinStage:
    """A fresh stage."""
    stage = PIPELINE.build_stages(0)[0]
    assert isinstance(stage, JoinStage)
    return stage


def written(steps: list[Step]) -> list[Rollout]:
    """The rollouts that steps write."""
    return [record for step in steps for emit in step.emits for record in emit.records if isinstance(record, Rollout)]


def test_join_lets_events_wait_for_an_opening_that_is_read_later() -> None:
    """Another topic may be read first, by any distance; the rollout is the same as with the opening first."""
    stage, whole = a_join(), events(WHOLE)

    steps = [stage.apply(event) for event in [*whole[3:4], *whole[5:], whole[0], *whole[1:3], whole[4]]]

    assert rollouts(join(*WHOLE)) == written(steps)
    assert not any(step.rejects for step in steps)


def test_join_makes_the_same_rollout_when_its_log_has_the_opening_last() -> None:
    """Even where the log itself puts the opening behind everything else, what waits is judged by its own topic's order."""
    order = [*WHOLE[1:], WHOLE[0]]

    simulation = join(*order)

    assert rollouts(join(*WHOLE)) == rollouts(simulation)
    assert simulation.held() == {}


@pytest.mark.parametrize(
    "entry",
    [entry for entry in WHOLE if entry != WHOLE[0]],
    ids=lambda entry: f"{entry[0]}-{type(entry[1]).__name__}",
)
def test_join_puts_what_nobody_opened_into_the_dead_letters(entry: tuple[str, Record]) -> None:
    """An event of any kind, a terminal too, that has no opening though all is read is kept as `no_opening`."""
    simulation = join(entry, tick_ms=DEADLINE_MS)

    while_waiting = reasons(simulation)
    simulation.tick(DEADLINE_MS + ORPHAN_AFTER_MS)

    assert [] == while_waiting
    assert [(entry[0], "no_opening")] == reasons(simulation)
    assert rollouts(simulation) == []
    assert simulation.held() == {}


def test_join_lets_every_orphan_wait_its_own_time() -> None:
    """An orphan that came later is not given up with an earlier one of its rollout."""
    stage = a_join()
    first, later = events([("environment", happened("e-1")), ("environment", happened("e-2"))])
    stage.apply(first)
    stage.tick(0)
    stage.apply(later)

    given_up = [stage.tick(now_ms).rejects for now_ms in (ORPHAN_AFTER_MS - 1, ORPHAN_AFTER_MS, 2 * ORPHAN_AFTER_MS)]

    assert [[], [first], [later]] == [[reject.event for reject in rejects] for rejects in given_up]


def test_join_makes_no_second_rollout_of_what_comes_after_it_was_forgotten() -> None:
    """A late event of a rollout that was done long ago is `no_opening`, whatever it is and whether or not it was in it."""
    simulation = join(*WHOLE)
    simulation.hosted[0].stage._ledger.forget("r-1/0")  # type: ignore[attr-defined]
    for noun, record in [*WHOLE[1:], ("calls", call("c-9"))]:
        simulation.append(noun, record)
    simulation.run()

    simulation.tick(0)
    simulation.tick(ORPHAN_AFTER_MS)

    assert 1 == len(rollouts(simulation))
    assert {"no_opening"} == {reason for _, reason in reasons(simulation)}
    assert len(WHOLE) == len(reasons(simulation))
    assert simulation.held() == {}


def test_join_drops_a_repeated_opening_of_a_rollout_that_it_remembers() -> None:
    """A client that asks again for what is done repeats itself."""
    simulation = join(*WHOLE, ("calls", opened(opened_at_ms=OPENED_MS + 500)))

    assert 1 == len(rollouts(simulation))
    assert simulation.dead == {}
    assert simulation.held() == {}


def test_join_times_out_a_rollout_that_is_opened_again_after_it_was_forgotten() -> None:
    """Nobody can tell it from a new one; it ends by its deadline, and the group refuses it."""
    simulation = join(*WHOLE)
    simulation.hosted[0].stage._ledger.forget("r-1/0")  # type: ignore[attr-defined]
    simulation.append("calls", opened())
    simulation.run()

    simulation.tick(DEADLINE_MS)

    assert [RolloutStatus.SUCCEEDED, RolloutStatus.TIMED_OUT] == [rollout.status for rollout in rollouts(simulation)]
    assert simulation.held() == {}


def test_join_lets_go_of_half_a_rollout_once_its_own_output_says_that_it_is_done() -> None:
    """Where half of a done rollout is read again before the own output, nothing of it is written or reported."""
    full = join(("calls", opened()), ("calls", call("c-1")), *barrier())
    stage = a_join()
    half = [event for noun in ("calls", "environment", "terminals") for event in full.logs[noun]][1:]

    steps = [stage.apply(event) for event in half]
    item = stage.own_output(full.logs["rollouts"][0])
    released = stage.item_done(item or "")
    again = stage.apply(full.logs["calls"][0])

    assert "r-1/0" == item
    assert {event.position for event in half} == set(released)
    assert () == sum((step.rejects for step in steps), ())
    assert ((full.logs["calls"][0].position,), ()) == (again.finished, again.rejects)


def test_join_gives_a_conflict_its_reason_when_the_rollout_turns_out_to_be_done() -> None:
    """Two contents that are held while the own output is read back are a conflict, as they were in the run before."""
    entries = [("calls", opened()), ("calls", call("c-1")), ("calls", call("c-1", error="other"))]
    done = join(*entries, *barrier())
    stage = a_join()
    for event in events(entries):
        stage.apply(event)

    stage.item_done(stage.own_output(done.logs["rollouts"][0]) or "")

    assert ["conflict", "conflict"] == [reject.reason for reject in stage.tick(0).rejects]


def test_join_looks_at_no_other_rollout_when_one_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ten thousand open rollouts, opening an attempt finds the one that it replaces by its id."""
    stage = a_join()
    for event in events([("calls", opened(f"r-{n}")) for n in range(50)]):
        stage.apply(event)
    for name in ("_open", "_attempts"):
        monkeypatch.setattr(stage, name, _NeverWalked(getattr(stage, name)))

    stage.apply(an_event(opened("r-7", attempt=1), "calls", 50))
    ends = [stage.apply(an_event(terminal("r-7"), noun, 51)) for noun, _ in barrier()]

    assert [RolloutStatus.ABORTED] == [rollout.status for rollout in written(ends)]


class _NeverWalked(dict[str, object]):
    def __iter__(self) -> object:  # type: ignore[override]
        raise AssertionError("walked over all open rollouts")

    items = keys = values = __iter__  # type: ignore[assignment]
