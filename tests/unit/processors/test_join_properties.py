"""Join under everything that may happen to a log: each rollout comes out as it would have, or a reason code says why not."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollstream.processors.base import Position
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    ClosedBy,
    Delivery,
    EnvironmentEvent,
    ModelCall,
    Record,
    RolloutOpened,
    RolloutStatus,
    Terminal,
)
from rollstream.schemas.types import Json
from tests.source_log import Entry, source_log
from tests.unit.processors.join_world import CODEC, TOPICS, JoinWorld
from tests.unit.processors.records import call, opened, started, terminal

SEEDS = st.integers(0, 1 << 30)
ALL = 20_000
RUNS = settings(max_examples=25, phases=[Phase.generate])
"""An example is a run over some 150 records, and a seed; a smaller seed would be no simpler a case."""


@dataclass
class Planted:
    """A log, and what must become of its records that are in no rollout."""

    by_rollout: dict[str, list[Entry]] = field(default_factory=dict)
    """The log, one rollout id at a time."""
    reasons: dict[bytes, str] = field(default_factory=dict)
    """Records for the dead letters, by their bytes, with the reason."""

    def plant(self, rollout_id: str, at: int, noun: str, record: Record, reason: str = "") -> None:
        """Put a record into a rollout."""
        self.by_rollout[rollout_id].insert(at, (noun, record))
        if reason:
            self.reasons[CODEC.encode(record)] = reason


@functools.cache
def planted(seed: int) -> Planted:
    """Plain rollouts, and one each with a conflict, something late, a delivery, a second attempt, no end, and nothing in it."""
    log = Planted()
    for noun, record in source_log(2, 3, seed):
        log.by_rollout.setdefault(_rollout_id(record), []).append((noun, record))
    ids = list(log.by_rollout)

    first = next(r for _, r in log.by_rollout[ids[0]] if isinstance(r, ModelCall))
    log.reasons[CODEC.encode(first)] = "conflict"
    log.plant(ids[0], 2, "calls", replace(first, error="other"), "conflict")
    event = next(r for _, r in log.by_rollout[ids[1]] if isinstance(r, EnvironmentEvent))
    at = log.by_rollout[ids[1]].index(("environment", event))
    log.reasons[CODEC.encode(event)] = "conflict"
    log.plant(ids[1], at + 1, "environment", replace(event, content=Json("0")), "conflict")

    end = len(log.by_rollout[ids[2]])
    late = next(r for _, r in log.by_rollout[ids[2]] if isinstance(r, ModelCall))
    log.plant(ids[2], end, "calls", replace(late, call_id="late"), "late")
    log.plant(ids[2], end, "environment", replace(event, rollout_id=ids[2], event_id="late"), "late")

    answered = next(r for _, r in log.by_rollout[ids[3]] if isinstance(r, ModelCall))
    delivery = CallDelivery(
        answered.call_id, ids[3], 0, answered.group_id, Delivery.PARTIAL, "ack_timeout", answered.finished_at_ms
    )
    log.plant(ids[3], 2, "calls", delivery)
    log.plant(ids[3], 2, "calls", replace(delivery, call_id="nobody"), "unknown_call")

    log.by_rollout["two"] = [
        ("calls", opened("two")), ("calls", started(call("t-0", rollout_id="two"))),
        ("calls", opened("two", attempt=1)), *[(noun, terminal("two")) for noun in TOPICS],
        *[(noun, terminal("two", attempt=1)) for noun in TOPICS],
    ]  # fmt: skip
    log.by_rollout["endless"] = [("calls", opened("endless")), ("calls", call("n-0", rollout_id="endless"))]
    log.by_rollout["empty"] = [("calls", opened("empty")), *[(noun, terminal("empty")) for noun in TOPICS]]
    return log


def shuffled(log: Planted, rng: random.Random) -> list[Entry]:
    """The log in another order that its writers may have left: rollouts are mixed anew within each topic, and so are the calls of
    a rollout between its opening and its end.
    """
    topics: dict[str, list[list[Record]]] = {noun: [] for noun in TOPICS}
    for entries in log.by_rollout.values():
        for noun in TOPICS:
            topics[noun].append(_calls_shuffled([record for of, record in entries if of == noun], rng))
    mixed = []
    for noun, queues in topics.items():
        while queues := [queue for queue in queues if queue]:
            mixed.append((noun, rng.choice(queues).pop(0)))
    return mixed


def doubled(entries: Sequence[Entry], rng: random.Random) -> list[Entry]:
    """Records repeated anywhere behind the first; an opening directly behind it, where a client that got no answer repeats it."""
    found = list(entries)
    for noun, record in rng.sample(list(entries), len(entries) // 2):
        first = found.index((noun, record))
        found.insert(
            first + 1 if isinstance(record, RolloutOpened) else rng.randint(first + 1, len(found)), (noun, record)
        )
    return found


@functools.cache
def expected(seed: int) -> dict[tuple[str, int], str]:
    """Digests of a log's rollouts when nothing happens to it."""
    log = planted(seed)
    world = JoinWorld([entry for entries in log.by_rollout.values() for entry in entries], seed, ALL)
    world.run(restarts=0)
    assert {CODEC.encode(_at(world, p)): {log.reasons[world.logs[p.noun][p.offset]]} for p in world.dead} == {
        CODEC.encode(_at(world, p)): reasons for p, reasons in world.dead.items()
    }
    assert {
        ("two", 0): "aborted",
        ("two", 1): "succeeded",
        ("endless", 0): "timed_out",
        ("empty", 0): "succeeded",
    } == {
        (r.rollout_id, r.attempt): r.status.value
        for r in world.rollouts()
        if r.rollout_id in ("two", "endless", "empty")
    }
    return digests(world)


def digests(world: JoinWorld) -> dict[tuple[str, int], str]:
    """Digest of each rollout that was written; all copies are equal."""
    found: dict[tuple[str, int], str] = {}
    for rollout in world.rollouts():
        assert found.setdefault((rollout.rollout_id, rollout.attempt), rollout.digest) == rollout.digest
    return found


@RUNS
@given(st.integers(0, 3), SEEDS)
def test_join_writes_the_same_rollouts_in_any_order(log: int, seed: int) -> None:
    """However rollouts and calls are mixed, topics interleaved and acknowledgements delayed, digests and reasons are the same."""
    world = JoinWorld(shuffled(planted(log), random.Random(seed)), seed, ALL)

    world.run(restarts=0)

    assert expected(log) == digests(world)
    assert len(expected(log)) == len(world.own)
    assert sorted(planted(log).reasons.items()) == sorted(
        (world.logs[p.noun][p.offset], reason) for p, reasons in world.dead.items() for reason in reasons
    )
    assert {0} == {len(held) for held in world.held.values()}


@RUNS
@given(st.integers(0, 3), SEEDS, st.integers(0, 4), st.sampled_from([0, 1, ALL]))
def test_join_writes_the_same_rollouts_with_repetitions_and_restarts_and_nothing_else(
    log: int, seed: int, restarts: int, kept_items: int
) -> None:
    """Half of all records twice, stages lost at any moment, done rollouts forgotten as early as allowed: the same digests.

    What is in a rollout is never in the dead letters too; a repetition of it may be `no_opening` once the rollout is forgotten.
    What is in no rollout keeps its reason, or is `late` if it is read when its rollout is done.
    """
    rng = random.Random(seed)
    world = JoinWorld(doubled(shuffled(planted(log), rng), rng), seed, kept_items)

    world.run(restarts)

    assert expected(log) == digests(world)
    reasons = planted(log).reasons
    for position, found in world.dead.items():
        topic = world.logs[position.noun]
        value = topic[position.offset]
        is_first = topic.index(value) == position.offset
        allowed = {reasons[value], "late"} if value in reasons else set()
        if not is_first or reasons.get(value) == "late":
            allowed.add("no_opening")
        assert found <= allowed
    assert reasons.keys() <= {world.logs[p.noun][p.offset] for p in world.dead}
    assert {0} == {len(held) for held in world.held.values()}


@RUNS
@given(st.integers(0, 3), SEEDS, st.floats(0, 0.6), st.integers(0, 3))
def test_join_says_what_is_missing_when_records_are_lost(log: int, seed: int, share: float, restarts: int) -> None:
    """Whatever is missing from a log, a rollout with an opening is written with what is there and the documented status, and what
    has no opening is `no_opening`.
    """
    rng = random.Random(seed)
    left = [entry for entry in source_log(2, 3, log) if rng.random() >= share]
    world = JoinWorld(left, seed, ALL)

    world.run(restarts)

    by_rollout: dict[str, list[Entry]] = {}
    for noun, record in left:
        by_rollout.setdefault(_rollout_id(record), []).append((noun, record))
    found = {rollout.rollout_id: rollout for rollout in world.rollouts()}
    whole = {name: records for name, records in by_rollout.items() if _has_opening(records)}
    assert whole.keys() == found.keys()
    for name, entries in whole.items():
        records = [record for _, record in entries]
        calls = {r.call_id for r in records if isinstance(r, ModelCall)}
        assert _status(entries) == (found[name].status, found[name].closed_by)
        assert calls == {one.call_id for one in found[name].calls}
        assert {r.call_id for r in records if isinstance(r, CallStarted)} - calls == set(found[name].lost_call_ids)
    orphans = {CODEC.encode(r) for name, entries in by_rollout.items() if name not in whole for _, r in entries}
    assert orphans == {world.logs[p.noun][p.offset] for p, reasons in world.dead.items() if "no_opening" in reasons}
    assert {0} == {len(held) for held in world.held.values()}


def _status(entries: list[Entry]) -> tuple[RolloutStatus, ClosedBy]:
    """What the docs say about a rollout of these records."""
    ends = {noun: record for noun, record in entries if isinstance(record, Terminal)}
    if ends.keys() != set(TOPICS):
        return RolloutStatus.TIMED_OUT, ClosedBy.DEADLINE
    end = ends["terminals"]
    calls = {record.call_id for _, record in entries if isinstance(record, CallStarted | ModelCall)}
    events = {record.event_id for _, record in entries if isinstance(record, EnvironmentEvent)}
    if (len(calls), len(events)) != (end.expected_calls, end.expected_events):
        return RolloutStatus.ABORTED, ClosedBy.DEADLINE
    return end.status, ClosedBy.BARRIER


def _calls_shuffled(records: list[Record], rng: random.Random) -> list[Record]:
    """Shuffle each run of records between openings and ends, but for environment events, whose order is the log's."""
    found: list[Record] = []
    run: list[Record] = []
    for record in records:
        if isinstance(record, CallStarted | ModelCall | CallDelivery):
            run.insert(rng.randint(0, len(run)), record)
        else:
            found, run = [*found, *run, record], []
    return [*found, *run]


def _has_opening(entries: list[Entry]) -> bool:
    return any(isinstance(record, RolloutOpened) for _, record in entries)


def _rollout_id(record: Record) -> str:
    return str(getattr(record, "rollout_id"))  # noqa: B009


def _at(world: JoinWorld, position: Position) -> Record:
    return CODEC.decode(world.logs[position.noun][position.offset])
