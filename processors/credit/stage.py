"""Credit: what compares the rewards of a group's rollouts, by the method that the pipeline names."""

from __future__ import annotations

from rollstream.errors import StageError
from rollstream.processors.config import Part, Signature
from rollstream.processors.credit.base import Method
from rollstream.processors.stateless import OneToOne
from rollstream.schemas.codec import with_digest
from rollstream.schemas.records import GroupCredits, GroupRewards, Record, StageRef


class CreditStage(OneToOne):
    """Credit, for one partition."""

    name = "credit"
    inputs: tuple[str, ...] = ("rewards",)
    output = "credits"

    def __init__(self, method: Method, config: Part, signature: Signature, score: StageRef) -> None:
        """Args: score: the score stage below the rewards, which the records name, too."""
        super().__init__()
        self._method = method
        self._config = config
        self._signature = signature
        self._score = score

    def make(self, record: Record) -> GroupCredits:
        if not isinstance(record, GroupRewards):
            raise StageError(f"credit cannot use a {type(record).__name__}, expected GroupRewards")
        result = self._method.run(record.group, record.rewards, self._config)
        return with_digest(
            GroupCredits(
                group=record.group,
                rewards_digest=record.digest,
                scope=result.scope,
                credits=result.credits,
                rewards=record.rewards,
                statistics=result.statistics,
                digest="",
                stage=self._signature.stage,
                scores_digest=record.scores_digest,
                earlier_stages=(self._score, record.stage),
                pipeline=self._signature.pipeline,
                pipeline_digest=self._signature.pipeline_digest,
            )
        )
