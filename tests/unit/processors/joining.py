"""Join in a simulation: source records in, rollouts and dead letters out."""

from __future__ import annotations

from typing import Any

from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.records import Record, Rollout
from tests.unit.processors.records import OPENED_MS, terminal
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


def barrier(rollout_id: str = "r-1", **changes: Any) -> list[tuple[str, Record]]:
    """A rollout's terminal in all three topics."""
    return [(noun, terminal(rollout_id, **changes)) for noun in ("calls", "environment", "terminals")]


def rollouts(simulation: Simulation) -> list[Rollout]:
    """What join wrote."""
    return [record for record in simulation.records("rollouts") if isinstance(record, Rollout)]


def reasons(simulation: Simulation) -> list[tuple[str, str]]:
    """Topic and reason of each dead letter."""
    return sorted((position.noun, reject.reason) for position, reject in simulation.dead.items())
