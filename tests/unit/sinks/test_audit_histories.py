"""The audit over histories that the real stages wrote: silent where nothing is wrong, and exact about where each call is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from rollstream.processors.ledger import ORPHAN_AFTER_MS
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import (
    CallDelivery,
    DeadLetter,
    Delivery,
    GroupBuilt,
    ModelCall,
    Outcome,
    Rollout,
    RolloutOpened,
    RolloutStatus,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json, pack_ids, unpack_ids
from tests.unit.processors.records import OPENED_MS, call, conversation, happened, opened, started, terminal
from tests.unit.processors.simulation import Simulation
from tests.unit.sinks.histories import Entry, audited, dead_letters, play, stored

LATER_MS = OPENED_MS + 10_000_000
"""Long after every deadline."""
ORPHANED_MS = LATER_MS + ORPHAN_AFTER_MS
"""When what waits for its opening since then is given up."""


def _begun(rollout_id: str, calls: Sequence[ModelCall] = (), *, attempt: int = 0, size: int = 2) -> list[Entry]:
    """A rollout that is still running."""
    entries: list[Entry] = [("calls", opened(rollout_id, attempt, group_size=size))]
    for one in calls or conversation(2, rollout_id=rollout_id):
        at_ms = OPENED_MS + 10 * one.call_index
        names = {"attempt": attempt, "call_id": f"{one.call_id}.a{attempt}", "prompt": _prompt(one, attempt)}
        one = dataclasses.replace(one, **names, started_at_ms=at_ms, finished_at_ms=at_ms + 5)  # type: ignore[arg-type]
        entries += [("calls", started(one)), ("calls", one)]
        event = happened(f"{one.call_id}-e", rollout_id, attempt=attempt, call_id=one.call_id)
        entries.append(("environment", event))
    return entries


def _without_opening(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not isinstance(entry[1], RolloutOpened)]


def _prompt(one: ModelCall, attempt: int):  # type: ignore[no-untyped-def]
    base = one.prompt.base_call_id
    return one.prompt if base is None else dataclasses.replace(one.prompt, base_call_id=f"{base}.a{attempt}")


def _ended(rollout_id: str, reward: float = 1.0, **changes: object) -> list[Entry]:
    outcome = Json(f'{{"reward": {reward}}}')
    return [(noun, terminal(rollout_id, **{"outcome": outcome, **changes})) for noun in TERMINAL_TOPICS]


def _whole(rollout_id: str, reward: float = 1.0, **changes: object) -> list[Entry]:
    size = changes.get("group_size", 2)
    return [*_begun(rollout_id, size=size), *_ended(rollout_id, reward, **changes)]  # type: ignore[arg-type]


def _late_call(rollout_id: str) -> list[Entry]:
    late = call(f"{rollout_id}.late", 7, rollout_id)
    delivery = CallDelivery(late.call_id, rollout_id, 0, "g-1", Delivery.NONE, "client_disconnected", OPENED_MS + 90)
    event = happened("late-e", rollout_id, call_id=late.call_id)
    return [("calls", started(late)), ("calls", late), ("calls", delivery), ("environment", event)]


def _late_news(rollout_id: str) -> list[Entry]:
    """A tool result and a delivery that come behind the end, about a call that came in time."""
    call_id = f"{rollout_id}.c1.a0"
    delivery = CallDelivery(call_id, rollout_id, 0, "g-1", Delivery.PARTIAL, "client_disconnected", OPENED_MS + 90)
    return [("calls", delivery), ("environment", happened("late-e", rollout_id, call_id=call_id))]


def _lost_call(rollout_id: str) -> list[Entry]:
    return [("calls", started(call(f"{rollout_id}.lost", 8, rollout_id)))]


def _undelivered(rollout_id: str) -> list[Entry]:
    call_id = f"{rollout_id}.c1.a0"
    return [("calls", CallDelivery(call_id, rollout_id, 0, "g-1", Delivery.NONE, "ack_timeout", OPENED_MS + 50))]


def _conflict(rollout_id: str) -> list[Entry]:
    """Two contents under one call id."""
    one = call(f"{rollout_id}.twice", 5, rollout_id)
    return [("calls", started(one)), ("calls", one), ("calls", dataclasses.replace(one, finish_reason="other"))]


def _late_conflict(rollout_id: str) -> list[Entry]:
    """Another prompt and content under the id of a call that is in the closed rollout."""
    known = np.arange(5, dtype=np.uint32)
    other = dataclasses.replace(
        call(f"{rollout_id}.c0.a0", 0, rollout_id), prompt=encode_prompt(known, {}), finish_reason="other"
    )
    return [("calls", other)]


def _again(rollout_id: str, *, is_lost: bool = False) -> list[Entry]:
    """A call whose answer did not arrive is made again under its id, samples something else, and is the base of the next."""
    first, _ = conversation(2, rollout_id=rollout_id)
    second = dataclasses.replace(first, call_attempt=1, output_ids=pack_ids([71, 72, 73]))
    said = np.concatenate([unpack_ids(second.prompt.suffix), unpack_ids(second.output_ids)])
    after = call(f"{rollout_id}.after", 1, rollout_id)
    longer = np.concatenate([said, np.array([5, 6], dtype=np.uint32)])
    after = dataclasses.replace(after, prompt=encode_prompt(longer, {first.call_id: said}))
    gone = CallDelivery(first.call_id, rollout_id, 0, "g-1", Delivery.NONE, "ack_timeout", OPENED_MS + 6)
    entries: list[Entry] = [("calls", opened(rollout_id))]
    entries += [("calls", record) for record in (started(first), first, gone, started(second))]
    if is_lost:
        return entries
    return [*entries, ("calls", second), ("calls", started(after)), ("calls", after)]


HISTORIES: dict[str, tuple[list[Entry], tuple[int, ...], dict[str, int]]] = {
    "whole": ([*_whole("r-1"), *_whole("r-2", 0.0)], (), {"in samples": 4}),
    "no spread": ([*_whole("r-1"), *_whole("r-2")], (), {"in samples": 4}),
    "open rollout": ([*_whole("r-1"), *_begun("r-2")], (), {"open": 4}),
    "open group": (_whole("r-1"), (), {"open": 2}),
    "late call": (
        [*_whole("r-1"), *_late_call("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 4, "quarantined": 1},
    ),
    "late call after its group": (
        [*_whole("r-1"), *_whole("r-2", 0.0), *_late_call("r-1")],
        (),
        {"in samples": 4, "quarantined": 1},
    ),
    "late tool result and delivery": (
        [*_whole("r-1"), *_late_news("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 4},
    ),
    "lost call": (
        [*_begun("r-1"), *_lost_call("r-1"), *_ended("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 4, "masked": 1},
    ),
    "undelivered call": (
        [*_begun("r-1"), *_undelivered("r-1"), *_ended("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 3, "masked": 1},
    ),
    "two contents of a call": (
        [*_begun("r-1"), *_conflict("r-1"), *_ended("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 4, "masked": 1},
    ),
    "late second content of a call": (
        [*_whole("r-1"), *_late_conflict("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 4},
    ),
    "call made again": (
        [*_again("r-1"), *_ended("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 4},
    ),
    "call made again and lost": (
        [*_again("r-1", is_lost=True), *_ended("r-1"), *_whole("r-2", 0.0)],
        (),
        {"in samples": 2, "masked": 1},
    ),
    "rollout that never ends": ([*_whole("r-1"), *_begun("r-2")], (LATER_MS,), {"masked": 4}),
    "group that times out": (
        [*_whole("r-1", group_size=3), *_whole("r-2", 0.0, group_size=3)],
        (LATER_MS,),
        {"in samples": 4},
    ),
    "rollout after its group": (
        [
            *_whole("r-1", group_size=3),
            *_whole("r-2", 0.0, group_size=3),
            ("calls", opened("r-3", group_size=3, opened_at_ms=OPENED_MS + 500_000)),
            *_begun("r-3", size=3)[1:],
            *_ended("r-3", group_size=3, finished_at_ms=OPENED_MS + 700_000),
        ],
        (LATER_MS,),
        {"in samples": 4, "quarantined": 2},
    ),
    "partial group": (_whole("r-1"), (LATER_MS,), {"masked": 2}),
    "aborted rollout": (
        [*_whole("r-1"), *_whole("r-2", status=RolloutStatus.ABORTED)],
        (),
        {"masked": 4},
    ),
    "all aborted": (
        [*_whole("r-1", status=RolloutStatus.ABORTED), *_whole("r-2", status=RolloutStatus.ABORTED)],
        (),
        {"masked": 4},
    ),
    "superseded while open": (
        [*_begun("r-1"), *_begun("r-1", attempt=1), *_ended("r-1", attempt=1), *_whole("r-2", 0.0)],
        (LATER_MS,),
        {"in samples": 4, "quarantined": 2},
    ),
    "superseded after its end": (
        [*_whole("r-1"), *_begun("r-1", attempt=1), *_ended("r-1", attempt=1), *_whole("r-2", 0.0)],
        (),
        {"in samples": 4, "quarantined": 2},
    ),
    "no opening and no end": (_without_opening(_begun("r-1")), (LATER_MS, ORPHANED_MS), {"quarantined": 2}),
    "no opening": (
        [*_without_opening(_begun("r-1")), *_ended("r-1"), *_whole("r-2", 0.0)],
        (LATER_MS, ORPHANED_MS),
        {"masked": 2, "quarantined": 2},
    ),
    "opening not there yet": ([*_without_opening(_begun("r-1")), *_whole("r-2", 0.0)], (), {"open": 4}),
    "counts that differ": (
        [*_begun("r-1"), *_ended("r-1", expected_calls=3), *_whole("r-2", 0.0)],
        (LATER_MS,),
        {"masked": 4},
    ),
    "no score": (
        [*_whole("r-1"), *_begun("r-2"), *_ended("r-2", outcome=Json("{}"))],
        (),
        {"masked": 4},
    ),
    "failed call": (
        [
            *_begun(
                "r-1",
                [call("r-1.c0", 0, outcome=Outcome.UPSTREAM_ERROR, trainable=False, defects=("not_completed",))],
            ),
            *_ended("r-1"),
            *_whole("r-2", 0.0),
        ],
        (),
        {"in samples": 2, "masked": 1},
    ),
    "base that was lost": (
        [
            *_begun("r-1", [c for c in conversation(3) if c.call_index != 1]),
            *_ended("r-1"),
            *_whole("r-2", 0.0),
        ],
        (),
        {"in samples": 3, "masked": 1},
    ),
}


FAILED_DO_NOT_COUNT = {"counts": tuple(s for s in RolloutStatus if s is not RolloutStatus.FAILED)}
POLICIES: dict[str, tuple[dict[str, object], list[Entry], tuple[int, ...], dict[str, int]]] = {
    "rollout that does not count, replaced": (
        FAILED_DO_NOT_COUNT,
        [*_whole("r-1"), *_whole("r-2", 0.0, status=RolloutStatus.FAILED), *_whole("r-3", 0.0)],
        (),
        {"in samples": 4, "quarantined": 2},
    ),
    "rollout that does not count, not replaced": (
        FAILED_DO_NOT_COUNT,
        [*_whole("r-1"), *_whole("r-2", 0.0, status=RolloutStatus.FAILED)],
        (LATER_MS,),
        {"masked": 2, "quarantined": 2},
    ),
}
"""Histories under other rules for groups."""


@pytest.mark.parametrize("name", POLICIES)
def test_audit_is_silent_under_every_policy_of_groups(name: str) -> None:
    """What the pipeline file allows is no finding either."""
    group, entries, ticks_ms, places = POLICIES[name]

    report = audited(play(entries, *ticks_ms, group=group))

    assert report.ok, str(report)
    assert places == {key.removeprefix("calls "): n for key, n in report.counts.items() if n}


def _revised() -> Simulation:
    """A group that closes at its deadline with two of three rollouts; the third comes and makes a revision."""
    simulation = play(
        [*_whole("r-1", group_size=3), *_whole("r-2", 0.0, group_size=3)],
        OPENED_MS + 700_000,
        group={"late": "revision"},
    )
    late = [
        ("calls", opened("r-3", group_size=3, opened_at_ms=OPENED_MS + 500_000)),
        *_begun("r-3", size=3)[1:],
        *_ended("r-3", group_size=3, finished_at_ms=OPENED_MS + 700_000),
    ]
    for noun, record in late:
        simulation.append(noun, record)
    simulation.run()
    for now_ms in (OPENED_MS + 800_000, OPENED_MS + 801_000):
        simulation.tick(now_ms)
    return simulation


def test_revision_places_every_call_again() -> None:
    """Each revision is checked by itself; a call of both is in one place."""
    simulation = _revised()

    report = audited(simulation)

    built = [record for record in simulation.records("samples") if isinstance(record, GroupBuilt)]
    assert [0, 1] == [one.group_revision for one in built]
    assert report.ok, str(report)
    assert {"in samples": 6} == {key.removeprefix("calls "): n for key, n in report.counts.items() if n}


@pytest.mark.parametrize("revision", [0, 1])
def test_call_that_one_revision_dropped_is_found(revision: int) -> None:
    """That the other revision has the call is no excuse."""
    simulation = _revised()
    (group,) = stored(simulation)
    dropped = next(sample for sample in group.samples if sample.group_revision == revision)
    group.samples.remove(dropped)
    group.built = [
        dataclasses.replace(one, sample_ids=tuple(i for i in one.sample_ids if i != dropped.sample_id))
        for one in group.built
    ]

    report = audited(simulation, [group])

    assert {s.call_id for s in dropped.segments} <= {finding.about for finding in report.findings["accounted"]}


def test_late_copy_of_a_group_does_not_hide_that_it_was_never_built() -> None:
    """`already_done` says that the first copy was built; only what build wrote shows it."""
    simulation = play(HISTORIES["whole"][0])
    (group,) = stored(simulation)
    group.built, group.samples = [], []
    copy = next(event for event in simulation.logs["groups"])
    position = copy.position
    letter = DeadLetter("copy", "score", "already_done", "", position.noun, 0, position.offset, copy.value, 0)

    report = audited(simulation, [group], [letter])

    assert report.counts["calls quarantined"] == 0
    assert {"samples"} == set(report.open_calls.values())


@pytest.mark.parametrize("name", HISTORIES)
def test_audit_is_silent_and_says_where_each_call_is(name: str) -> None:
    """Whatever happens to rollouts and groups without a fault is no finding, and each call is in one place."""
    entries, ticks_ms, places = HISTORIES[name]

    report = audited(play(entries, *ticks_ms))

    assert report.ok, str(report)
    assert places == {key.removeprefix("calls "): n for key, n in report.counts.items() if n}


@pytest.mark.parametrize("seed", range(3))
def test_audit_is_silent_after_restarts(seed: int) -> None:
    """Stages that are thrown away and start again write records twice; the audit sees one of each."""
    entries, _, places = HISTORIES["lost call"]
    simulation = play(entries[:7], seed=seed)
    for noun, record in entries[7:]:
        simulation.append(noun, record)
        for _ in range(seed + 1):
            simulation.step()
        simulation.start()
    simulation.run()

    report = audited(simulation)

    assert report.ok, str(report)
    assert places == {key.removeprefix("calls "): n for key, n in report.counts.items() if n}


def _built(simulation: Simulation) -> GroupBuilt:
    (built,) = [record for record in simulation.records("samples") if isinstance(record, GroupBuilt)]
    return built


def test_late_news_of_a_call_do_not_hide_that_it_was_dropped() -> None:
    """A dead letter about a call's tool result or delivery is not the call."""
    simulation = play([*_begun("r-1"), *_undelivered("r-1"), *_ended("r-1"), *_late_news("r-1"), *_whole("r-2", 0.0)])
    (group,) = stored(simulation)
    (masked,) = _built(simulation).masked
    group.built = [dataclasses.replace(group.built[0], masked=())]

    report = audited(simulation, [group])

    assert any(letter.call_id == masked.call_id for letter in dead_letters(simulation))
    assert masked.call_id in {finding.about for finding in report.findings["accounted"]}


def test_refused_twin_of_a_rollout_does_not_hide_that_a_call_was_dropped() -> None:
    """Another join wrote the rollout too, and was refused: its dead letter holds the same calls."""
    simulation = play(HISTORIES["lost call"][0])
    rollout = next(r for r in simulation.records("rollouts") if isinstance(r, Rollout) and r.lost_call_ids)
    simulation.append("rollouts", dataclasses.replace(rollout, digest="other"))
    simulation.run()
    (group,) = stored(simulation)
    group.rollouts = [row for row in group.rollouts if row.digest != "other"]
    group.built = [dataclasses.replace(group.built[0], masked=())]

    report = audited(simulation, [group])

    assert simulation.dead
    assert {rollout.lost_call_ids[0]} == {finding.about for finding in report.findings["accounted"]}


def test_call_that_is_trained_on_and_masked_is_found() -> None:
    """Each call has one place."""
    simulation = play(HISTORIES["lost call"][0])
    (group,) = stored(simulation)
    masked = group.built[0].masked[0]
    twice = dataclasses.replace(
        masked, call_id=group.samples[0].segments[0].call_id, rollout_id=group.samples[0].rollout_id
    )
    group.built = [dataclasses.replace(group.built[0], masked=(masked, twice))]

    report = audited(simulation, [group])

    assert twice.call_id in {finding.about for finding in report.findings["accounted"]}


@pytest.mark.parametrize("name", ["lost call", "undelivered call", "partial group", "aborted rollout", "failed call"])
def test_mask_with_a_false_reason_is_found(name: str) -> None:
    """Whoever asks why tokens are not trained on must get the truth."""
    entries, ticks_ms, _ = HISTORIES[name]
    simulation = play(entries, *ticks_ms)
    (group,) = stored(simulation)
    first, *rest = group.built[0].masked
    group.built = [
        dataclasses.replace(group.built[0], masked=(dataclasses.replace(first, reason="logprob_missing"), *rest))
    ]

    report = audited(simulation, [group])

    assert {first.call_id} == {finding.about for finding in report.findings["accounted"]}
    assert "is masked as 'logprob_missing', its records say" in str(report)


def test_group_without_its_record_is_open() -> None:
    """Samples that no record names reach no trainer, so their calls are not accounted for yet."""
    simulation = play(HISTORIES["whole"][0])
    (group,) = stored(simulation)
    group.built = []

    report = audited(simulation, [group])

    assert report.ok
    assert {"samples"} == set(report.open_calls.values())
    assert not audited(simulation, [group], closed=True).ok


def test_sample_of_a_call_that_did_not_arrive_is_found() -> None:
    """An agent that never saw an answer did not act on it."""
    simulation = play(HISTORIES["whole"][0])
    (group,) = stored(simulation)
    row = group.rollouts[0]
    refs = tuple(dataclasses.replace(ref, delivered=Delivery.NONE) for ref in row.calls)
    group.rollouts = [dataclasses.replace(row, calls=refs), *group.rollouts[1:]]

    report = audited(simulation, [group])

    assert "did not reach the client whole" in str(report)


@pytest.mark.parametrize("name", ["late call", "superseded after its end", "two contents of a call"])
def test_dead_letters_in_a_registry_s_framing_account_for_what_they_hold(name: str) -> None:
    """What stands in the log is framed for the registry; the records are the same."""
    from rollstream.schemas.codec import Codec, schema_files
    from rollstream.schemas.registry import ConfluentRegistry
    from rollstream.sinks.audit import audit_evidence
    from rollstream.sinks.check_accounted import quarantine

    registry = ConfluentRegistry("mock://audit-histories")
    for schema in schema_files().values():
        registry.register(schema)
    codec = Codec(registry)
    entries, ticks_ms, places = HISTORIES[name]
    simulation = play(entries, *ticks_ms)
    framed = [dataclasses.replace(x, value=codec.encode(Codec().decode(x.value))) for x in dead_letters(simulation)]

    report = audit_evidence(
        iter(stored(simulation)), held=quarantine(framed, codec), bounds={}, unknown_samples=[], counts={}
    )

    assert report.ok, str(report)
    assert places == {key.removeprefix("calls "): n for key, n in report.counts.items() if n}
