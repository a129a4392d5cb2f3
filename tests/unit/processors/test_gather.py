"""Gather: what is left over when everything is read belongs to what was done before, and pins no offset."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollstream.errors import StageError
from rollstream.processors.base import Event, Stage
from rollstream.processors.config import PipelineConfig
from rollstream.processors.ledger import ORPHAN_AFTER_MS
from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.records import Group, GroupCredits, Record, Rollout
from tests.unit.processors.records import OPENED_MS, a_group, a_rollout, some_credits, with_reward
from tests.unit.processors.simulation import CODEC, Simulation, an_event, default_pipeline

NOW_MS = OPENED_MS + 1_000_000
STAGES = ("score", "build")
NOUN = {"score": "groups", "build": "credits"}


def deciding(name: str, rollouts: list[Rollout]) -> Group | GroupCredits:
    """What a stage waits for."""
    return a_group(rollouts) if name == "score" else some_credits(rollouts, [1.0] * len(rollouts))


def gather(name: str, *records: Record, at: Pipeline | None = None) -> Simulation:
    """Give records to a stage."""
    simulation = Simulation(at or default_pipeline(), 0, [name])
    for record in records:
        simulation.append("rollouts" if isinstance(record, Rollout) else NOUN[name], record)
    simulation.run()
    return simulation


def reasons(simulation: Simulation) -> list[tuple[str, str]]:
    """Topic and reason of every dead letter."""
    return sorted((letter.event.position.noun, letter.reason) for letter in simulation.letters)


def revising() -> Pipeline:
    """The pipeline that ships, with revisions."""
    values = default_pipeline().config.model_dump(mode="json")
    values["group"]["late"] = "revision"
    return Pipeline(PipelineConfig(**values))


@pytest.mark.parametrize("name", STAGES)
def test_decision_without_its_rollouts_is_let_go_of_after_two_ticks(name: str) -> None:
    """Half a minute apart, since two machines' clocks differ; nothing is made of it."""
    simulation = gather(name, deciding(name, [a_rollout("r-1"), a_rollout("r-2")]))

    simulation.tick(NOW_MS)
    simulation.tick(NOW_MS + ORPHAN_AFTER_MS - 1)
    before = reasons(simulation)
    simulation.tick(NOW_MS + ORPHAN_AFTER_MS)

    assert ([], [(NOUN[name], "already_done")]) == (before, reasons(simulation))
    assert simulation.held() == {}


@pytest.mark.parametrize("name", STAGES)
def test_rollouts_that_came_in_part_are_let_go_of_with_their_decision(name: str) -> None:
    """Their bytes are kept with it: whether the group was built cannot be seen from here."""
    rollouts = [a_rollout("r-1"), a_rollout("r-2")]
    simulation = gather(name, rollouts[0], deciding(name, rollouts))

    for after_ms in (0, ORPHAN_AFTER_MS):
        simulation.tick(NOW_MS + after_ms)

    assert [(NOUN[name], "already_done"), ("rollouts", "already_done")] == sorted(reasons(simulation))
    assert simulation.held() == {}


@pytest.mark.parametrize("name", STAGES)
def test_decision_is_used_when_its_rollouts_come_between_the_ticks(name: str) -> None:
    """One tick without them is not enough."""
    rollouts = [a_rollout("r-1"), a_rollout("r-2")]
    simulation = gather(name, deciding(name, rollouts))
    simulation.tick(NOW_MS)
    for rollout in rollouts:
        simulation.append("rollouts", rollout)
    simulation.run()

    simulation.tick(NOW_MS + ORPHAN_AFTER_MS)

    assert [] == reasons(simulation)
    assert simulation.records("scores" if name == "score" else "samples")
    assert simulation.held() == {}


@pytest.mark.parametrize("name", STAGES)
def test_rollout_that_nobody_decides_about_waits_as_long_as_its_group_is_remembered(name: str) -> None:
    """A slow scorer, or a processor that is down, takes no rollout away from its group."""
    remembered_ms = a_rollout().closed_at_ms + 600_000 + 3_600_000
    simulation = gather(name, a_rollout("r-1"))

    simulation.tick(remembered_ms - 1)
    simulation.tick(remembered_ms)
    before = reasons(simulation)
    simulation.tick(remembered_ms + ORPHAN_AFTER_MS)

    assert ([], [("rollouts", "already_done")]) == (before, reasons(simulation))
    assert simulation.held() == {}


@pytest.mark.parametrize("name", STAGES)
def test_rollouts_are_kept_for_revisions_and_let_go_of_then(name: str) -> None:
    """They stay uncommitted for `revise_within_s` after the group, and the decision does not."""
    rollouts = [with_reward("r-1", 1.0), with_reward("r-2", 0.0)]
    simulation = gather(name, *rollouts, decision := deciding(name, rollouts), at=revising())
    group = decision if isinstance(decision, Group) else decision.group
    final_ms = group.closed_at_ms + 600_000 + ORPHAN_AFTER_MS

    simulation.tick(final_ms - 1)
    before = {stage: {noun: set(at) for noun, at in held.items()} for stage, held in simulation.held().items()}
    simulation.tick(final_ms)

    assert {name: {"rollouts": {0, 1}}} == before
    assert ({}, []) == (simulation.held(), reasons(simulation))


@pytest.mark.parametrize("name", STAGES)
def test_stage_refuses_a_record_that_it_cannot_use(name: str) -> None:
    """A record of another kind is an error that names it, and nothing is held of it."""
    wrong = deciding("build" if name == "score" else "score", [a_rollout()])

    with pytest.raises(StageError, match=f"{name} cannot use a {type(wrong).__name__}, expected a Rollout or"):
        _stage(name).apply(an_event(wrong, NOUN[name], 0))


def test_waiting_rollouts_are_held_as_bytes() -> None:
    """A scorer's rollout is decoded when it runs, and build's when its group is built: until then nobody decodes one."""
    decoded: list[int] = []

    def lazily(rollout: Rollout, offset: int) -> Event:
        event = an_event(rollout, "rollouts", offset)

        def decode(value: bytes) -> Any:
            decoded.append(offset)
            return CODEC.decode(value)

        event._decode = decode
        return event

    score, build = _stage("score"), _stage("build")
    rollouts = [with_reward(f"r-{i}", 1.0) for i in range(40)]
    work = []
    for offset, rollout in enumerate(rollouts):
        event = lazily(rollout, offset)
        work += score.apply(event).work
        build.apply(event)
        event.thin()
    before = list(decoded)

    asyncio.run(_run(work[0]))
    emits = build.apply(an_event(some_credits(rollouts, [1.0] * 40), "credits", 0)).emits

    assert [] == before
    assert 16 == len(work)
    assert [0, *range(40)] == sorted(decoded)
    assert 1 == len(emits)


async def _run(work: Any) -> object:
    return await work.run()


def _stage(name: str) -> Stage:
    return next(stage for stage in default_pipeline().build_stages(0) if stage.name == name)
