"""Build: a group's rollouts and credits become samples, then one `GroupBuilt` that accounts for every call.

What a sample holds is decided in `rows.py` (which calls share one) and `samples.py` (what is in it).
"""

from __future__ import annotations

from rollstream.errors import StageError
from rollstream.processors.base import NOTHING, Emit, Event, Position, Step
from rollstream.processors.config import BuildConfig, Signature
from rollstream.processors.gather import Gather, marks_of_decision
from rollstream.processors.samples import build_group
from rollstream.schemas.records import GroupBuilt, GroupCredits


class BuildStage:
    """Build, for one partition."""

    name = "build"
    inputs: tuple[str, ...] = ("rollouts", "credits")
    output = "samples"
    reads_own_output = True
    remembers_ms = 0

    def __init__(self, config: BuildConfig, signature: Signature) -> None:
        self._config = config
        self._signature = signature
        self._gather = Gather(self.name)

    def apply(self, event: Event) -> Step:
        item, step = self._gather.take(event)
        gathered = self._gather.complete(item)
        if gathered is None or gathered.decision is None:
            return step
        credits = gathered.decision.record
        if not isinstance(credits, GroupCredits):
            raise StageError(f"build cannot use a {type(credits).__name__}, expected GroupCredits")
        rollouts = {digest: gathered.rollout(digest) for digest in gathered.rollouts}
        samples, built = build_group(credits, rollouts, self._config, self._signature)
        emit = Emit(item, (*samples, built), self._gather.close(item))
        return Step((emit,), step.rejects, step.finished, step.work)

    def tick(self, now_ms: int) -> Step:
        return self._gather.ledger.step()

    def own_output(self, event: Event) -> str | None:
        built = event.record
        if not isinstance(built, GroupBuilt):
            return None
        item = f"{built.group_id}/{built.group_revision}"
        self._gather.ledger.read_back(item, lambda: marks_of_decision(built.credits_digest))
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        return self._gather.done(item)

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING

    def forget(self, item: str) -> None:
        """Nothing: what is remembered is bounded by the ledger."""
