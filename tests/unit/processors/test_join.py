"""Join: complete at the barrier, indifferent to the order across topics, and nothing lost on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.processors import join as join_module
from rollstream.processors.rows import lay_out
from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import CallDelivery, ClosedBy, Delivery, PromptDelta, Record, RolloutStatus
from rollstream.schemas.types import Json
from tests.source_log import source_log
from tests.unit.processors.joining import DEADLINE_MS, PIPELINE, barrier, join, reasons, rollouts
from tests.unit.processors.records import OPENED_MS, call, conversation, happened, opened, started, terminal
from tests.unit.processors.simulation import Simulation, an_event


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


def test_join_writes_an_empty_rollout() -> None:
    """A rollout that was opened and finished, and did nothing, is a rollout; its group waits for it."""
    simulation = join(("calls", opened()), *barrier())

    (rollout,) = rollouts(simulation)
    assert ((), (), ()) == (rollout.calls, rollout.events, rollout.lost_call_ids)
    assert (RolloutStatus.SUCCEEDED, None) == (rollout.status, rollout.version_min)
    assert simulation.dead == {}


def test_join_aborts_a_rollout_whose_terminal_counts_calls_that_never_came() -> None:
    """A terminal without its calls waits for them until the deadline, and what it counts in vain is not trained on."""
    entries = [("calls", opened()), *barrier(expected_calls=1)]

    assert rollouts(join(*entries)) == []
    assert [RolloutStatus.ABORTED] == [r.status for r in rollouts(join(*entries, tick_ms=DEADLINE_MS))]


def test_join_quarantines_both_of_two_events_with_one_id_and_drops_what_repeats_either() -> None:
    """One event id with two contents: each content is in the dead letters once, however often it was sent."""
    one, other = happened("e-1"), happened("e-1", content=Json("1"))

    simulation = join(
        ("calls", opened()), *[("environment", event) for event in (one, other, one, other)], *barrier()
    )

    assert [("environment", "conflict")] * 2 == reasons(simulation)
    assert () == rollouts(simulation)[0].events
    assert simulation.held() == {}


def test_join_finishes_a_duplicate_at_once() -> None:
    """A repeated record is let go of when it is read, which is where the shell counts it."""
    stage = PIPELINE.build_stages(0)[0]
    for offset, record in enumerate([opened(), call("c-1")]):
        stage.apply(an_event(record, "calls", offset))

    again = an_event(call("c-1"), "calls", 2)

    assert ((again.position,), (), ()) == (
        (step := stage.apply(again)).finished, step.rejects, step.emits,
    )  # fmt: skip


def test_join_refuses_the_terminal_that_a_later_finish_contradicts() -> None:
    """If two `finish` requests say different things, the one that reached `terminals` counts; the other is kept."""
    simulation = join(
        ("calls", opened()), ("calls", terminal(status=RolloutStatus.FAILED)), ("environment", terminal()),
        ("terminals", terminal()),
    )  # fmt: skip

    assert [RolloutStatus.SUCCEEDED] == [rollout.status for rollout in rollouts(simulation)]
    assert [("calls", "conflict")] == reasons(simulation)
    assert simulation.held() == {}


def test_join_keeps_a_call_whose_base_is_missing() -> None:
    """A prompt written against a call that is not there is build's to mask; the call itself stays accounted for."""
    orphan = call("c-2", prompt=PromptDelta(call("c-1").output_ids, 5, "d", base_call_id="c-1", base_len=3))

    (rollout,) = rollouts(join(("calls", opened()), ("calls", orphan), *barrier()))

    assert ["c-2"] == [one.call_id for one in rollout.calls]
    assert [("c-2", "base_missing")] == [(m.call_id, m.reason) for m in lay_out(rollout, "merge", {})[1]]


@pytest.mark.parametrize("seed", range(6))
def test_join_makes_one_rollout_of_the_calls_that_two_gateways_wrote(seed: int) -> None:
    """Whatever each replica wrote first, the rollout is the same, and prompts find bases that the other one wrote."""
    calls = conversation(6)
    ours, theirs = ([x for c in calls[at::2] for x in (started(c), c)] for at in (0, 1))
    rng = random.Random(seed)
    mixed = [rng.choice([q for q in (ours, theirs) if q]).pop(0) for _ in range(len(ours) + len(theirs))]

    (rollout,) = rollouts(join(("calls", opened()), *[("calls", record) for record in mixed], *barrier(), seed=seed))

    assert tuple(calls) == rollout.calls
    assert {one.call_id for one in calls} == set(decode_prompts(rollout.calls)[0])


def test_join_tells_attempts_apart_when_a_rollout_id_looks_like_one() -> None:
    """Ids are the client's: one with a slash and a number in it is another rollout, and replaces no attempt of it."""
    simulation = join(
        ("calls", opened("r")), ("calls", opened("r/0")), ("calls", opened("r/0", attempt=1)),
        *[(noun, terminal(name)) for name in ("r", "r/0") for noun in ("calls", "environment", "terminals")],
        *[(noun, terminal("r/0", attempt=1)) for noun in ("calls", "environment", "terminals")],
    )  # fmt: skip

    assert {
        ("r", 0): RolloutStatus.SUCCEEDED,
        ("r/0", 0): RolloutStatus.ABORTED,
        ("r/0", 1): RolloutStatus.SUCCEEDED,
    } == {(r.rollout_id, r.attempt): r.status for r in rollouts(simulation)}


def test_join_closes_expired_rollouts_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When everything expires at once, a tick closes only so many bytes; the rest follows with the next ticks."""
    monkeypatch.setattr(join_module, "CLOSED_AT_ONCE_BYTES", 1)
    simulation = join(*[("calls", opened(f"r-{n}")) for n in range(3)])

    written = []
    for _ in range(4):
        simulation.tick(DEADLINE_MS)
        written.append((len(rollouts(simulation)), simulation.hosted[0].stage.pending_ms is not None))

    assert [(1, True), (2, True), (3, False), (3, False)] == written
