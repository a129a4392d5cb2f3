"""Build: a group's rollouts and credits become samples, then one `GroupBuilt` that accounts for every call.

What a sample holds is decided in `rows.py` (which calls share one) and `samples.py` (what is in it). Rollouts are decoded here,
when their group is built, and not before.
"""

from __future__ import annotations

from dataclasses import replace

from rollstream.errors import StageError
from rollstream.processors.base import NOTHING, Emit, Event, Position, Step
from rollstream.processors.config import BuildConfig, GroupConfig, Signature
from rollstream.processors.gather import Decision, Gather
from rollstream.processors.samples import build_group
from rollstream.schemas.records import GroupBuilt, GroupCredits


class BuildStage:
    """Build, for one partition."""

    name = "build"
    inputs: tuple[str, ...] = ("rollouts", "credits")
    output = "samples"
    reads_own_output = True
    pending_ms = None

    def __init__(self, config: BuildConfig, group: GroupConfig, signature: Signature) -> None:
        """Args: group: what the group stage does, which says how long a rollout may be waited for."""
        self.remembers_ms = group.retain_ms  # no longer than it must: its output is as large as its input
        self._config = config
        self._signature = signature
        self._gather = Gather(self.name, GroupCredits, group)

    def apply(self, event: Event) -> Step:
        group_id, step = self._gather.take(event)
        emits = tuple(self._build(one) for one in self._gather.decisions(group_id) if not one.missing)
        return replace(step, emits=emits) if emits else step

    def tick(self, now_ms: int) -> Step:
        return self._gather.tick(now_ms)

    def own_output(self, event: Event) -> str | None:
        built = event.record
        if not isinstance(built, GroupBuilt):
            return None
        item = f"{built.group_id}/{built.group_revision}"
        self._gather.read_back(item, built.group_id, built.credits_digest, built.created_at_ms)
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        return self._gather.done(item)

    def work_done(self, key: str, result: object) -> Step:
        return NOTHING

    def forget(self, item: str) -> None:
        """Nothing: what is remembered is bounded by the ledger."""

    def _build(self, decision: Decision) -> Emit:
        credits = decision.event.record
        if not isinstance(credits, GroupCredits):
            raise StageError(f"build cannot use a {type(credits).__name__}, expected GroupCredits")
        group_id = decision.group.group_id
        rollouts = {digest: self._gather.rollout(group_id, digest) for digest in decision.members}
        samples, built = build_group(credits, rollouts, self._config, self._signature)
        return Emit(decision.item, (*samples, built), self._gather.close(decision))
