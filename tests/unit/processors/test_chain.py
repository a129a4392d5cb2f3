"""All six stages, chained: from a source log to samples, in any order, with repetitions, restarts and ends."""

from __future__ import annotations

import random

import pytest

from rollstream.processors.base import Position
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import GroupBuilt, ModelCall, Record, Sample
from tests.source_log import Entry, source_log
from tests.unit.processors.simulation import Simulation, default_pipeline

CODEC = Codec()
GROUPS, SIZE = 3, 4


def run(log: list[Entry], seed: int, restarts: int = 0) -> Simulation:
    """Play a source log into a simulation, topic by topic in log order, with restarts at any moment."""
    simulation = Simulation(default_pipeline(), seed)
    rng = random.Random(seed)
    topics = {noun: [r for n, r in log if n == noun] for noun in ("calls", "environment", "terminals")}
    restart_at = {rng.randrange(len(log) * 3) for _ in range(restarts)}
    for at in range(len(log) * 3):
        noun = rng.choice([noun for noun, left in topics.items() if left] or [None])
        if noun is not None:
            simulation.append(noun, topics[noun].pop(0))
        for _ in range(rng.randrange(4)):
            simulation.step()
        if at in restart_at:
            simulation.start()
    simulation.run()
    simulation.tick(0)
    return simulation


def outputs(simulation: Simulation) -> dict[str, bytes]:
    """The bytes of every sample and marker, by identity."""
    found: dict[str, bytes] = {}
    for record in simulation.records("samples"):
        name = record.sample_id if isinstance(record, Sample) else f"built {record.group_id}"  # type: ignore[union-attr]
        value = CODEC.encode(record)
        assert found.setdefault(name, value) == value
    return found


@pytest.mark.parametrize("seed", range(6))
def test_chain_writes_the_same_bytes_in_any_interleaving(seed: int) -> None:
    """Which topic is read first, and when an output is acknowledged, changes no byte of any sample."""
    log = source_log(GROUPS, SIZE, seed)

    one, other = run(log, seed=1), run(log, seed=2)

    assert outputs(one) == outputs(other)
    assert sum(isinstance(r, GroupBuilt) for r in one.records("samples")) == GROUPS


@pytest.mark.parametrize("seed", range(8))
def test_chain_writes_the_same_bytes_after_restarts(seed: int) -> None:
    """Stages that are thrown away and read again what was not committed write what they would have written."""
    log = source_log(GROUPS, SIZE, seed)

    simulation = run(log, seed, restarts=6)

    assert outputs(simulation) == outputs(run(log, seed=99))
    assert simulation.dead == {}


@pytest.mark.parametrize("seed", range(3))
def test_chain_drops_repeated_records(seed: int) -> None:
    """Every source record written twice, anywhere behind the first, makes nothing else and no dead letter."""
    log = source_log(GROUPS, SIZE, seed)
    doubled: list[Entry] = []
    rng = random.Random(seed)
    for entry in log:
        doubled.append(entry)
        doubled.append(rng.choice(doubled))

    simulation = run(doubled, seed, restarts=2)

    assert outputs(simulation) == outputs(run(log, seed=1))
    assert simulation.dead == {}


def test_chain_holds_nothing_in_the_end() -> None:
    """When all groups are built, every event of every topic is let go of, so that offsets are committed to the end."""
    simulation = run(source_log(GROUPS, SIZE), seed=0)

    assert simulation.held() == {}


def test_chain_accounts_for_every_call() -> None:
    """Every call of the source log is in exactly one sample or masked with a reason."""
    log = source_log(GROUPS, SIZE, seed=4)

    simulation = run(log, seed=0)

    samples = [r for r in simulation.records("samples") if isinstance(r, Sample)]
    built = [r for r in simulation.records("samples") if isinstance(r, GroupBuilt)]
    placed = [s.call_id for sample in samples for s in sample.segments]
    placed += [masked.call_id for group in built for masked in group.masked]
    assert sorted(placed) == sorted(_call_ids(log))


def test_chain_writes_dead_letters_for_what_comes_too_late() -> None:
    """A call behind its rollout's end is not lost: it is in the dead letters, with its bytes."""
    log = source_log(1, 2)
    late = next(record for _, record in log if isinstance(record, ModelCall))
    late = type(late)(**{**{f: getattr(late, f) for f in late.__slots__}, "call_id": "late"})

    simulation = run([*log, ("calls", late)], seed=0, restarts=3)

    position = Position("calls", 0, sum(noun == "calls" for noun, _ in log))
    assert {position: "late"} == {at: reject.reason for at, reject in simulation.dead.items()}
    assert CODEC.encode(late) == simulation.dead[position].event.value


def _call_ids(log: list[tuple[str, Record]]) -> list[str]:
    return [record.call_id for _, record in log if isinstance(record, ModelCall)]
