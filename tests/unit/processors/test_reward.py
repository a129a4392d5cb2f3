"""Reward: a weighted sum, clipped, or a reason why there is none; and the stage around it."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.processors.base import Event
from rollstream.processors.config import RewardConfig
from rollstream.processors.reward import RewardStage, reward
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import GroupClose, GroupRewards, GroupScores, Reward, RolloutStatus, Score
from tests.unit.processors.records import SIGNATURE, a_group, a_rollout
from tests.unit.processors.simulation import an_event

CONFIG = RewardConfig(components={"a": 1.0, "b": -0.5}, clip=(-1.0, 1.0))


def a_score(rollout_id: str, scorer: str, value: float | None) -> Score:
    """A raw score."""
    return Score(f"{rollout_id}-{scorer}", rollout_id, scorer, "kind", 1, "config", value)


def some_scores(values: dict[str, dict[str, float | None]], **group: Any) -> GroupScores:
    """Scores of a group, by rollout and scorer."""
    rollouts = [a_rollout(rollout_id) for rollout_id in values]
    found = tuple(a_score(r, s, v) for r, of in sorted(values.items()) for s, v in of.items())
    return with_digest(GroupScores(a_group(rollouts, **group), found, "", SIGNATURE.stage, "default", "pipeline"))


def rewarded(scores: GroupScores) -> tuple[Reward, ...]:
    """The rewards that the stage makes of scores."""
    return RewardStage(CONFIG, SIGNATURE).make(scores).rewards


def test_reward_is_the_weighted_sum_with_its_components() -> None:
    """Every number of the reward can be followed back to a raw score."""
    (one,) = rewarded(some_scores({"r-1": {"a": 0.75, "b": 0.5, "unused": 9.0}}))

    assert (0.5, None) == (one.value, one.excluded)
    assert [("r-1-a", "a", 0.75, 1.0, 0.75), ("r-1-b", "b", 0.5, -0.5, -0.25)] == [
        (c.score_id, c.scorer, c.raw, c.weight, c.value) for c in one.components
    ]


@pytest.mark.parametrize(("a", "expected"), [(7.0, 1.0), (-7.0, -1.0)])
def test_reward_is_clipped_and_its_components_are_not(a: float, expected: float) -> None:
    """The total stays in its range; the raw contributions stay visible."""
    (one,) = rewarded(some_scores({"r-1": {"a": a, "b": 0.0}}))

    assert (expected, a) == (one.value, one.components[0].value)


@pytest.mark.parametrize("scores", [{"a": 1.0}, {"a": 1.0, "b": None}])
def test_reward_is_excluded_when_a_score_is_missing(scores: dict[str, float | None]) -> None:
    """A missing score is never taken as 0."""
    (one,) = rewarded(some_scores({"r-1": scores}))

    assert (None, "score_missing") == (one.value, one.excluded)


def test_reward_is_excluded_in_a_partial_group() -> None:
    """A group with too few rollouts is not trained on."""
    found = rewarded(some_scores({"r-1": {"a": 1.0, "b": 0.0}}, closed_by=GroupClose.PARTIAL))

    assert ["group_too_small"] == [one.excluded for one in found]


def test_reward_is_excluded_for_an_aborted_rollout() -> None:
    """What was stopped from outside says nothing about the policy; its reason comes first."""
    (member,) = a_group([a_rollout(status=RolloutStatus.ABORTED)]).members

    assert "aborted" == reward(member, {}, CONFIG, is_partial=True).excluded


def test_stage_lets_go_of_its_input_when_the_output_is_acknowledged() -> None:
    """An input repeated while its output is on the way makes no second one and is let go of with it."""
    stage = RewardStage(CONFIG, SIGNATURE)
    scores = some_scores({"r-1": {"a": 1.0, "b": 0.0}})
    events: list[Event] = [an_event(scores, "scores", offset) for offset in range(3)]

    first, again = stage.apply(events[0]), stage.apply(events[1])
    (emit,) = first.emits
    released = stage.item_done(emit.item)
    later = stage.apply(events[2])

    assert (1, ()) == (len(emit.records), again.emits)
    assert (events[0].position, events[1].position) == released
    assert ((), (events[2].position,)) == (later.emits, later.finished)


def test_stage_makes_nothing_new_from_what_an_earlier_run_wrote() -> None:
    """After a restart the stage's own output says what is done, so that repeated scores do not multiply down the line."""
    scores = some_scores({"r-1": {"a": 1.0, "b": 0.0}})
    (emit,) = RewardStage(CONFIG, SIGNATURE).apply(an_event(scores, "scores", 0)).emits
    restarted = RewardStage(CONFIG, SIGNATURE)

    item = restarted.own_output(an_event(emit.records[0], "rewards", 0))
    assert item is not None
    restarted.item_done(item)
    step = restarted.apply(an_event(scores, "scores", 0))

    assert ((), 1) == (step.emits, len(step.finished))


def test_stage_writes_both_of_two_contents() -> None:
    """Two contents of one group are two outputs; the stage that needs one of them decides."""
    stage = RewardStage(CONFIG, SIGNATURE)
    one, other = (some_scores({"r-1": {"a": a, "b": 0.0}}) for a in (0.0, 1.0))

    emits = [stage.apply(an_event(scores, "scores", at)).emits[0] for at, scores in enumerate((one, other))]

    assert 2 == len({emit.item for emit in emits})
    assert [one.digest, other.digest] == [
        emit.records[0].scores_digest for emit in emits if isinstance(emit.records[0], GroupRewards)
    ]
