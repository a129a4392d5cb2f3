"""The credit stage: what it carries along so that a sample can name its whole descent."""

from __future__ import annotations

from rollstream.processors.credit import METHODS
from rollstream.processors.credit.stage import CreditStage
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import CreditStatus, GroupRewards, Reward, StageRef
from tests.unit.processors.records import SIGNATURE, a_group, a_rollout


def test_credit_names_rewards_scores_and_stages() -> None:
    """Digests and stages of everything below are in the record."""
    group = a_group([a_rollout("r-1"), a_rollout("r-2")])
    rewards = (Reward("r-1", (), 1.0), Reward("r-2", (), 0.0))
    source = with_digest(
        GroupRewards(group, "scores", rewards, "", StageRef("reward", "k", 1, "c"), "default", "pipeline")
    )
    score = StageRef("score", "k", 1, "c")
    method = METHODS["dr_grpo"]

    made = CreditStage(method, method.config(), SIGNATURE, score).make(source)

    assert (source.digest, "scores", rewards) == (made.rewards_digest, made.scores_digest, made.rewards)
    assert (score, source.stage) == made.earlier_stages
    assert [("r-1", CreditStatus.OK, 0.5), ("r-2", CreditStatus.OK, -0.5)] == [
        (one.rollout_id, one.status, one.value) for one in made.credits
    ]
