"""Join: complete at the barrier, indifferent to the order across topics, and nothing lost on the way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.records import (
    CallDelivery,
    ClosedBy,
    Delivery,
    Record,
    Rollout,
    RolloutOpened,
    RolloutStatus,
)
from rollstream.schemas.types import Json
from tests.source_log import source_log
from tests.unit.processors.records import OPENED_MS, call, happened, opened, started, terminal
from tests.unit.processors.simulation import Simulation, default_pipeline

PIPELINE: Pipeline = default_pipeline()
DEADLINE_MS = OPENED_MS + 600_000


def join(*entries: tuple[str, Record], tick_ms: int | None = None, seed: int = 0) -> Simulation:
    """Give entries to join, each topic in the order given here, topics interleaved by the seed."""
    simulation = Simulation(PIPELINE, seed, ["join"])
    for noun, record in entries:
        simulation.append(noun, record)
    simulation.run()
    if tick_ms is not None:
        simulation.tick(tick_ms)
    simulation.tick(0)
    return simulation


def barrier(**changes: Any) -> list[tuple[str, Record]]:
    """A rollout's terminal in all three topics."""
    return [(noun, terminal(**changes)) for noun in ("calls", "environment", "terminals")]


def rollouts(simulation: Simulation) -> list[Rollout]:
    """What join wrote."""
    return [record for record in simulation.records("rollouts") if isinstance(record, Rollout)]


def reasons(simulation: Simulation) -> list[tuple[str, str]]:
    """Topic and reason of each dead letter."""
    return sorted((position.noun, reject.reason) for position, reject in simulation.dead.items())


def test_join_completes_a_rollout_when_its_terminal_is_in_all_topics() -> None:
    """A rollout holds opening, calls, events and terminal, and is written at its barrier."""
    one = call("c-1")

    simulation = join(
        ("calls", opened()), ("calls", started(one)), ("calls", one), ("environment", happened("e-1")), *barrier()
    )

    (rollout,) = rollouts(simulation)
    assert (one,) == rollout.calls
    assert (happened("e-1"),) == rollout.events
    assert (RolloutStatus.SUCCEEDED, ClosedBy.BARRIER) == (rollout.status, rollout.closed_by)
    assert (OPENED_MS, OPENED_MS + 100) == (rollout.opened_at_ms, rollout.closed_at_ms)
    assert ('{"answer": "4"}', '{"reward": 1}') == (rollout.task, rollout.outcome)
    assert (0, 0) == (rollout.version_min, rollout.version_max)
    assert simulation.held() == {}


@pytest.mark.parametrize("missing", ["calls", "environment", "terminals"])
def test_join_waits_for_the_terminal_in_every_topic(missing: str) -> None:
    """Two of three terminals are not the end: the third topic may still be behind."""
    simulation = join(("calls", opened()), *[entry for entry in barrier() if entry[0] != missing])

    assert rollouts(simulation) == []


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.booleans())
def test_join_writes_the_same_rollouts_in_any_interleaving_with_duplicates(
    log: int, order: int, doubled: bool
) -> None:
    """The order across topics, and any number of repeated records behind the first, change no digest."""
    entries = source_log(2, 2, seed=log % 50)
    rng = random.Random(order)
    repeated = []
    for entry in entries:
        repeated.append(entry)
        if doubled and rng.random() < 0.5:
            repeated.append(rng.choice(repeated))

    found = rollouts(join(*repeated, seed=order))

    expected = {r.rollout_id: r for r in rollouts(join(*entries))}
    assert expected == {r.rollout_id: r for r in found}
    assert len(found) == 4


def test_join_names_calls_without_an_outcome_as_lost() -> None:
    """An intent whose outcome never came before the end is in the rollout, by its id."""
    simulation = join(("calls", opened()), ("calls", started(call("c-1"))), *barrier())

    assert ("c-1",) == rollouts(simulation)[0].lost_call_ids


def test_join_corrects_delivery_by_the_worst_report() -> None:
    """A call whose answer did not arrive whole says so in the rollout, whatever was believed before."""
    one = call("c-1", delivered=Delivery.FULL)
    partial = CallDelivery("c-1", "r-1", 0, "g-1", Delivery.PARTIAL, "client_disconnected", OPENED_MS + 8)

    simulation = join(
        ("calls", opened()), ("calls", one), ("calls", replace(partial, delivered=Delivery.NONE)), ("calls", partial),
        *barrier(),
    )  # fmt: skip

    assert (replace(one, delivered=Delivery.NONE),) == rollouts(simulation)[0].calls
    assert simulation.held() == {}
    assert simulation.dead == {}


def test_join_takes_an_event_that_was_sent_again_later_for_the_same() -> None:
    """A client that got no answer sends the event again; the gateway gives it another time, and it still counts once."""
    again = happened("e-1", at_ms=OPENED_MS + 9)

    simulation = join(("calls", opened()), ("environment", happened("e-1")), ("environment", again), *barrier())

    assert (happened("e-1"),) == rollouts(simulation)[0].events
    assert simulation.dead == {}
    assert simulation.held() == {}


def test_join_rejects_a_delivery_of_a_call_that_is_nowhere() -> None:
    """A correction without a call is kept in the dead letters."""
    stray = CallDelivery("c-9", "r-1", 0, "g-1", Delivery.NONE, "ack_timeout", OPENED_MS + 8)

    simulation = join(("calls", opened()), ("calls", stray), *barrier())

    assert [("calls", "unknown_call")] == reasons(simulation)


def test_join_quarantines_both_of_two_calls_with_one_id() -> None:
    """One id with two contents: neither may be trained on, both are kept, and the call stays accounted for."""
    one = call("c-1")
    other = replace(one, output_ids=one.output_ids[:4])

    simulation = join(("calls", opened()), ("calls", started(one)), ("calls", one), ("calls", other), *barrier())

    assert [("calls", "conflict"), ("calls", "conflict")] == reasons(simulation)
    assert () == rollouts(simulation)[0].calls
    assert ("c-1",) == rollouts(simulation)[0].lost_call_ids
    assert simulation.held() == {}


def test_join_lets_the_first_opening_count() -> None:
    """A client that opens a rollout twice repeats itself; with another task, the second one is a conflict."""
    again = opened(opened_at_ms=OPENED_MS + 3)
    other = opened(task=Json("{}"))

    simulation = join(("calls", opened()), ("calls", again), ("calls", other), *barrier())

    assert OPENED_MS == rollouts(simulation)[0].opened_at_ms
    assert [("calls", "conflict")] == reasons(simulation)


def test_join_takes_the_terminal_topics_word_when_finish_was_repeated() -> None:
    """A repeated `finish` with another time ends the rollout once, at the time in `terminals`."""
    later = terminal(finished_at_ms=OPENED_MS + 150)

    simulation = join(
        ("calls", opened()), ("calls", terminal()), ("environment", terminal()),
        ("calls", later), ("environment", later), ("terminals", later),
    )  # fmt: skip

    assert OPENED_MS + 150 == rollouts(simulation)[0].closed_at_ms
    assert simulation.dead == {}
    assert simulation.held() == {}


@pytest.mark.parametrize("seed", range(4))
def test_join_rejects_what_comes_behind_its_topics_terminal(seed: int) -> None:
    """Late is decided by the topic's own log, so it is the same however the topics are interleaved."""
    simulation = join(
        ("calls", opened()), *barrier(), ("calls", call("c-9")), ("environment", happened("e-9")), seed=seed
    )

    assert [("calls", "late"), ("environment", "late")] == reasons(simulation)
    assert () == rollouts(simulation)[0].calls
    assert simulation.held() == {}


@pytest.mark.parametrize("seed", range(4))
def test_join_does_not_let_a_late_record_quarantine_an_earlier_one(seed: int) -> None:
    """Other content under a known id, behind the end, is late; the first record counts in any interleaving."""
    one = call("c-1")

    simulation = join(
        ("calls", opened()), ("calls", one), *barrier(), ("calls", replace(one, error="other")), seed=seed
    )

    assert (one,) == rollouts(simulation)[0].calls
    assert [("calls", "late")] == reasons(simulation)


@pytest.mark.parametrize("seed", range(4))
def test_join_waits_for_the_counts_that_the_terminal_names(seed: int) -> None:
    """As long as the terminal counts more records than are in, those behind it belong to the rollout."""
    ends = barrier(expected_calls=1, expected_events=1)

    simulation = join(
        ("calls", opened()), *ends, ("calls", call("c-1")), ("environment", happened("e-1")),
        ("environment", happened("e-2")), seed=seed,
    )  # fmt: skip

    assert [("c-1", "e-1")] == [(r.calls[0].call_id, r.events[0].event_id) for r in rollouts(simulation)]
    assert [("environment", "late")] == reasons(simulation)


def test_join_counts_a_call_once_however_often_it_was_attempted() -> None:
    """A harness that counts its calls does not see the repetitions of its client library."""
    again = call("c-1", 0, call_attempt=1)

    simulation = join(
        ("calls", opened()), ("calls", started(call("c-1"))), ("calls", call("c-1")), ("calls", started(again)),
        ("calls", again), *barrier(expected_calls=1),
    )  # fmt: skip

    assert [0, 1] == [one.call_attempt for one in rollouts(simulation)[0].calls]


def test_join_aborts_a_rollout_whose_counts_stay_wrong() -> None:
    """A rollout that is known to lack a call is written with what came, and is not trained on."""
    simulation = join(("calls", opened()), ("calls", call("c-1")), *barrier(expected_calls=2), tick_ms=DEADLINE_MS)

    (rollout,) = rollouts(simulation)
    assert (RolloutStatus.ABORTED, ClosedBy.DEADLINE) == (rollout.status, rollout.closed_by)
    assert ["c-1"] == [one.call_id for one in rollout.calls]
    assert simulation.held() == {}


def test_join_closes_a_rollout_without_terminal_at_its_deadline() -> None:
    """A rollout that never finishes is timed out on event time, with everything that came."""
    before = join(("calls", opened()), ("calls", call("c-1")), tick_ms=DEADLINE_MS - 1)
    after = join(("calls", opened()), ("calls", call("c-1")), ("calls", terminal()), tick_ms=DEADLINE_MS)

    assert rollouts(before) == []
    (rollout,) = rollouts(after)
    assert (RolloutStatus.TIMED_OUT, ClosedBy.DEADLINE) == (rollout.status, rollout.closed_by)
    assert (DEADLINE_MS, "{}", 1) == (rollout.closed_at_ms, rollout.outcome, len(rollout.calls))
    assert [("calls", "late")] == reasons(after)
    assert after.held() == {}


def test_join_decides_the_same_when_a_late_terminal_is_read_before_the_deadline_passes() -> None:
    """A rebuild reads the whole log before time passes; what happened after the deadline stays late."""
    late = call("c-2", finished_at_ms=DEADLINE_MS + 5)
    entries = [("calls", opened()), ("calls", call("c-1")), ("calls", late)]
    ends = barrier(finished_at_ms=DEADLINE_MS + 9)

    live = join(*entries, tick_ms=DEADLINE_MS)
    rebuilt = join(*entries, *ends)

    assert rollouts(live) == rollouts(rebuilt)
    assert [("calls", "late")] * 2 + [("environment", "late"), ("terminals", "late")] == reasons(rebuilt)
    assert rebuilt.held() == {}


def test_join_puts_a_rollout_that_nobody_opened_into_the_dead_letters() -> None:
    """Without opening and terminal nobody knows the task or the group's size; the records are kept."""
    simulation = join(("calls", call("c-1")), ("environment", happened("e-1")), tick_ms=DEADLINE_MS + 10)

    assert rollouts(simulation) == []
    assert [("calls", "no_opening"), ("environment", "no_opening")] == reasons(simulation)
    assert simulation.held() == {}


def test_join_writes_a_rollout_that_is_too_large_for_a_record_without_its_contents() -> None:
    """It stops neither worker nor group: an empty `aborted` rollout, and all it would hold in the dead letters."""
    big = [happened(f"e-{n}", content=Json('"' + "x" * 3_000_000 + '"')) for n in range(3)]

    simulation = join(
        ("calls", opened()), ("calls", started(call("c-1"))), ("calls", call("c-1")),
        *[("environment", event) for event in big], *barrier(),
    )  # fmt: skip

    (rollout,) = rollouts(simulation)
    assert (RolloutStatus.ABORTED, (), (), ()) == (
        rollout.status, rollout.calls, rollout.events, rollout.lost_call_ids,
    )  # fmt: skip
    assert [("calls", "too_large")] * 2 + [("environment", "too_large")] * 3 == reasons(simulation)
    assert simulation.held() == {}


def test_join_puts_a_rollout_whose_task_and_outcome_are_too_large_into_the_dead_letters() -> None:
    """There is nothing left to leave out."""
    big = Json('{"x": "' + "x" * 5_000_000 + '"}')

    simulation = join(("calls", opened(task=big)), *barrier(outcome=big))

    assert rollouts(simulation) == []
    assert {"too_large"} == {reason for _, reason in reasons(simulation)}
    assert simulation.held() == {}


@pytest.mark.parametrize("seed", range(4))
def test_join_aborts_an_attempt_that_was_replaced_before_it_ended(seed: int) -> None:
    """A higher attempt opened before the lower one's end makes the lower one `aborted`, in any interleaving."""
    second = barrier(attempt=1)

    simulation = join(
        ("calls", opened()), ("environment", happened("e-1")), ("calls", opened(attempt=1)), *barrier(), *second,
        seed=seed,
    )  # fmt: skip

    found = {r.attempt: (r.status, len(r.events)) for r in rollouts(simulation)}
    assert {0: (RolloutStatus.ABORTED, 1), 1: (RolloutStatus.SUCCEEDED, 0)} == found
    assert simulation.dead == {}
    assert simulation.held() == {}


@pytest.mark.parametrize("seed", range(6))
def test_join_keeps_an_attempt_that_ended_before_the_next_was_opened(seed: int) -> None:
    """Attempts one after the other are two rollouts; which one counts is the group's question."""
    simulation = join(("calls", opened()), *barrier(), ("calls", opened(attempt=1)), seed=seed)

    assert [RolloutStatus.SUCCEEDED] == [rollout.status for rollout in rollouts(simulation)]


def test_join_orders_calls_by_index_and_not_by_arrival() -> None:
    """Two gateways may write calls of a rollout in any order."""
    simulation = join(("calls", opened()), ("calls", call("b", 1)), ("calls", call("a", 0)), *barrier())

    assert ["a", "b"] == [one.call_id for one in rollouts(simulation)[0].calls]


@pytest.mark.parametrize("seed", range(10))
def test_join_tells_late_records_from_repeated_ones_after_a_restart(seed: int) -> None:
    """What is read again is let go of if it is in the rollout, and goes to the dead letters if it is not."""
    simulation = Simulation(PIPELINE, seed, ["join"])
    entries: list[tuple[str, Record]] = [
        ("calls", opened()),
        ("calls", call("c-1")),
        ("environment", happened("e-1")),
    ]
    for noun, record in [*entries, *barrier(), ("calls", call("c-9")), ("environment", happened("e-9"))]:
        simulation.append(noun, record)
    for _ in range(3):
        for _ in range(simulation.rng.randrange(20)):
            simulation.step()
        simulation.start()

    simulation.run()
    simulation.tick(0)

    assert [("calls", "late"), ("environment", "late")] == reasons(simulation)
    assert {1} == {len(rollout.calls) for rollout in rollouts(simulation)}
    assert 1 == len({rollout.digest for rollout in rollouts(simulation)})
    assert simulation.held() == {}


def test_join_takes_what_the_log_says_over_what_it_rebuilt_from_a_half() -> None:
    """Where half of a done rollout is read again before the own output, nothing of it is written or reported."""
    full = join(("calls", opened()), ("calls", call("c-1")), *barrier())
    stage = PIPELINE.build_stages(0)[0]
    half = [event for noun in ("calls", "environment", "terminals") for event in full.logs[noun]]
    half = [event for event in half if not isinstance(event.record, RolloutOpened)]

    steps = [stage.apply(event) for event in half]
    item = stage.own_output(full.logs["rollouts"][0])
    released = stage.item_done(item or "")
    again = stage.apply(full.logs["calls"][0])

    assert "r-1/0" == item
    assert {event.position for event in half} == set(released)
    assert () == sum((step.rejects for step in steps), ())
    assert ((full.logs["calls"][0].position,), ()) == (again.finished, again.rejects)
