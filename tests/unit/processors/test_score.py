"""Score: scorers start early and run a few at a time; a group's scores are written once all are in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollstream.processors.base import Stage, Step
from rollstream.processors.config import PipelineConfig
from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.records import Group, GroupScores, Rollout, RolloutStatus, Score
from tests.unit.processors.records import a_group, a_rollout, with_reward
from tests.unit.processors.simulation import Simulation, an_event, default_pipeline


def pipeline(**score: Any) -> Pipeline:
    """The default pipeline with another score part."""
    values = default_pipeline().config.model_dump()
    values["score"].update(score)
    return Pipeline(PipelineConfig(**values))


def score(*records: Rollout | Group, seed: int = 0) -> Simulation:
    """Give rollouts and groups to score."""
    simulation = Simulation(default_pipeline(), seed, ["score"])
    for record in records:
        simulation.append("rollouts" if isinstance(record, Rollout) else "groups", record)
    simulation.run()
    simulation.tick(0)
    return simulation


def scores(simulation: Simulation) -> list[GroupScores]:
    """What score wrote."""
    return [record for record in simulation.records("scores") if isinstance(record, GroupScores)]


def stage_of(built: Pipeline) -> Stage:
    """The score stage alone."""
    return built.build_stages(0)[2]


def result(step: Step, at: int = 0) -> tuple[str, object]:
    """Run a step's work."""

    async def run() -> object:
        return await step.work[at].run()

    return step.work[at].key, asyncio.run(run())


@pytest.mark.parametrize("seed", range(6))
def test_score_writes_a_groups_scores_in_any_order(seed: int) -> None:
    """Group before rollouts or after, repeated or not: one record, the same digest."""
    rollouts = [with_reward("r-2", 1.0), with_reward("r-1", 0.5)]
    group = a_group(rollouts)

    simulation = score(*rollouts, group, *rollouts, group, seed=seed)

    (record,) = scores(simulation)
    assert [("r-1", "outcome", 0.5), ("r-2", "outcome", 1.0)] == [
        (s.rollout_id, s.scorer, s.value) for s in record.scores
    ]
    assert scores(score(*rollouts, group))[0].digest == record.digest
    assert simulation.held() == {}


def test_score_starts_scorers_before_the_group_is_closed() -> None:
    """A rollout is scored as soon as it is in."""
    step = stage_of(default_pipeline()).apply(an_event(with_reward("r-1", 1.0), "rollouts", 0))

    assert 1 == len(step.work)
    assert () == step.emits


def test_score_runs_no_more_than_its_limit_and_one_that_hangs_blocks_no_other() -> None:
    """With two places, one taken for good, all other rollouts are scored through the second."""
    stage = stage_of(pipeline(max_concurrency=2))
    rollouts = [with_reward(f"r-{i}", i) for i in range(5)]

    steps = [stage.apply(an_event(rollout, "rollouts", i)) for i, rollout in enumerate(rollouts)]
    running = [work for step in steps for work in step.work]
    assert 2 == len(running)
    done = []
    step = steps[1]
    while step.work:
        key, said = result(step)
        done.append(key)
        step = stage.work_done(key, said)

    assert 4 == len(done)


def test_score_digest_does_not_depend_on_latency() -> None:
    """How long a scorer took is recorded and changes nothing else."""
    rollout = with_reward("r-1", 1.0)
    written = []
    for latency_ms in (1, 99):
        stage = stage_of(default_pipeline())
        key, said = result(stage.apply(an_event(rollout, "rollouts", 0)))
        assert isinstance(said, Score)
        stage.apply(an_event(a_group([rollout]), "groups", 0))
        (emit,) = stage.work_done(key, replace(said, latency_ms=latency_ms)).emits
        written.append(emit.records[0])

    assert [1, 99] == [record.scores[0].latency_ms for record in written if isinstance(record, GroupScores)]
    assert 1 == len({record.digest for record in written if isinstance(record, GroupScores)})


def test_score_does_not_run_scorers_on_aborted_rollouts() -> None:
    """What was stopped from outside has no score, and does not hold up its group."""
    rollouts = [a_rollout("r-1", status=RolloutStatus.ABORTED), with_reward("r-2", 1.0)]

    simulation = score(*rollouts, a_group(rollouts))

    assert ["r-2"] == [s.rollout_id for s in scores(simulation)[0].scores]


@pytest.mark.parametrize("seed", range(4))
def test_score_lets_go_of_rollouts_that_are_not_in_the_group(seed: int) -> None:
    """A rollout that came too late for its group is not held for ever."""
    member, stranger = with_reward("r-1", 1.0), with_reward("r-9", 1.0)

    simulation = score(member, stranger, a_group([member]), seed=seed)

    assert simulation.held() == {}
    assert ["r-1"] == [s.rollout_id for s in scores(simulation)[0].scores]


def test_score_is_made_of_members_only() -> None:
    """A stranger is let go of when the group comes, and is not among what the scores were made of."""
    stage = stage_of(default_pipeline())
    member, stranger = with_reward("r-1", 1.0), with_reward("r-9", 1.0)

    first = stage.apply(an_event(member, "rollouts", 0))
    stage.apply(an_event(stranger, "rollouts", 1))
    closed = stage.apply(an_event(a_group([member]), "groups", 0))
    (emit,) = stage.work_done(*result(first)).emits

    assert [("rollouts", 1)] == [(position.noun, position.offset) for position in closed.finished]
    assert {("rollouts", 0), ("groups", 0)} == {(position.noun, position.offset) for position in emit.used}


def test_score_rejects_a_second_group_with_other_content() -> None:
    """Two closings of one group: the first counts, the second is kept."""
    rollouts = [with_reward("r-1", 1.0), with_reward("r-2", 0.0)]

    simulation = score(*rollouts, a_group(rollouts), a_group(rollouts[:1]))

    assert ["conflict"] == [reject.reason for reject in simulation.dead.values()]
    assert simulation.held() == {}


def test_score_forgets_the_turns_of_a_group_that_turns_out_to_be_done() -> None:
    """After a restart, scorers that wait for a group in the log already are not run."""
    stage = stage_of(pipeline(max_concurrency=1))
    rollouts = [with_reward("r-1", 1.0), with_reward("r-2", 0.0)]
    record = scores(score(*rollouts, a_group(rollouts)))[0]

    first, second = (stage.apply(an_event(rollout, "rollouts", i)) for i, rollout in enumerate(rollouts))
    item = stage.own_output(an_event(record, "scores", 0))
    released = stage.item_done(item or "")
    after = stage.work_done(*result(first))

    assert (1, 0, 0) == (len(first.work), len(second.work), len(after.work))
    assert {0, 1} == {position.offset for position in released}


@pytest.mark.parametrize("seed", range(8))
def test_score_survives_restarts(seed: int) -> None:
    """Scores are written with one digest however often the stage starts again."""
    rollouts = [with_reward("r-1", 1.0), with_reward("r-2", 0.0)]
    simulation = Simulation(default_pipeline(), seed, ["score"])
    for rollout in rollouts:
        simulation.append("rollouts", rollout)
    simulation.append("groups", a_group(rollouts))
    for _ in range(3):
        for _ in range(simulation.rng.randrange(8)):
            simulation.step()
        simulation.start()

    simulation.run()

    assert 1 == len({record.digest for record in scores(simulation)})
    assert simulation.held() == {}
