"""Score: every scorer's raw verdict on every rollout of a group, written once the group is closed.

Scorers start as soon as a rollout is in, before its group is closed. A partition asks for at most `max_concurrency` at
once, the others wait their turn in the order of arrival; the shell runs no more than that in a process. They run outside the
stage (`Work`), each with its own time limit, so one that never returns costs one place for that long and blocks nothing
else. A scorer that fails gives a score without a value and with an error; a missing score is never 0. Rollouts that ended as
`aborted` are not scored.

A rollout that waits for its turn is held as its event; `Work.run` decodes it. Where groups may be revised, a rollout's scores
are kept with it, and those in the log are used again: a revision scores its late member alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollstream.errors import StageError
from rollstream.processors.base import Emit, Event, Position, Step, Work
from rollstream.processors.config import GroupConfig, ScoreConfig, ScorerConfig, Signature
from rollstream.processors.gather import Decision, Gather
from rollstream.processors.scorers.base import Scorer, run_scorer
from rollstream.schemas.codec import with_digest
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import Group, GroupScores, Rollout, RolloutStatus, Score


@dataclass(frozen=True, slots=True)
class _Scoring:
    """One scorer of the pipeline."""

    spec: ScorerConfig
    """What the pipeline file says of it."""
    config_digest: str
    """Digest of its configuration."""
    scorer: Scorer
    """The scorer."""

    def empty(self, rollout_id: str, digest: str) -> Score:
        """Its score of a rollout, without a value."""
        spec = self.spec
        return Score(
            score_id=digest_json("score", digest, spec.name, spec.kind, spec.version, self.config_digest),
            rollout_id=rollout_id,
            scorer=spec.name,
            kind=spec.kind,
            version=spec.version,
            config_digest=self.config_digest,
        )


@dataclass(slots=True)
class _Scored:
    """A rollout that is held, and what is known of its scores."""

    rollout_id: str
    """The rollout."""
    group_id: str
    """Its group."""
    closed_at_ms: int
    """When it was closed."""
    is_scored: bool
    """Whether it is to be scored at all."""
    has_begun: bool = False
    """Whether its scorers wait for their turn, run, or are done."""
    scores: dict[str, Score] = field(default_factory=dict)
    """By scorer."""


class ScoreStage:
    """Score, for one partition."""

    name = "score"
    inputs: tuple[str, ...] = ("rollouts", "groups")
    output = "scores"
    reads_own_output = True

    def __init__(
        self,
        config: ScoreConfig,
        group: GroupConfig,
        signature: Signature,
        scorers: Sequence[tuple[ScorerConfig, Scorer]],
    ) -> None:
        """
        Args:
            group: what the group stage does, which says how long a rollout may be waited for.
            scorers: in the order in which their scores are written.
        """
        self.remembers_ms = round(
            group.remember_s * 1000
        )  # as group does: what it refuses as late is held here by nobody
        self._signature = signature
        self._max_concurrency = config.max_concurrency
        self._scorings = [_Scoring(spec, digest_json(spec.config), scorer) for spec, scorer in scorers]
        self._may_revise = group.retain_ms > 0
        self._scored: dict[str, _Scored] = {}
        """By rollout digest, as long as the rollout is held."""
        self._gather = Gather(self.name, Group, group, gone=lambda digest: self._scored.pop(digest, None))
        self._written: dict[str, dict[str, Score]] = {}
        """Scores in the log of groups that may be revised, by group and score id."""
        self._waiting: deque[tuple[str, _Scoring]] = deque()
        self._running: set[str] = set()
        self._unscored: list[tuple[int, str]] = []
        """Rollouts whose scorers wait or run, by when they were closed; entries of others are stale."""

    def apply(self, event: Event) -> Step:
        record = event.record
        group_id, step = self._gather.take(event)
        if isinstance(record, Rollout):
            self._hold(record)
        for decision in self._gather.decisions(group_id):
            if decision.event is event:
                self._expect(decision)
        return self._next(group_id, step)

    @property
    def pending_ms(self) -> int | None:
        while self._unscored and not self._is_pending(self._unscored[0][1]):
            heapq.heappop(self._unscored)
        return self._unscored[0][0] if self._unscored else None

    def tick(self, now_ms: int) -> Step:
        step = self._gather.tick(now_ms)
        for group_id in [group_id for group_id in self._written if not self._gather.is_open(group_id)]:
            del self._written[group_id]
        return step

    def own_output(self, event: Event) -> str | None:
        record = event.record
        if not isinstance(record, GroupScores):
            return None
        group = record.group
        item = f"{group.group_id}/{group.revision}"
        self._gather.read_back(item, group.group_id, group.digest, group.closed_at_ms)
        if self._may_revise:
            self._written.setdefault(group.group_id, {}).update({score.score_id: score for score in record.scores})
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        return self._gather.done(item)

    def work_done(self, key: str, result: object) -> Step:
        self._running.discard(key)
        digest, _, _ = key.partition("/")
        scored = self._scored.get(digest)
        if scored is None or not isinstance(result, Score):
            return self._next("", self._gather.ledger.step())
        scored.scores[result.scorer] = result
        if self._has_all(scored):
            for decision in self._gather.decisions(scored.group_id):
                decision.unscored.discard(digest)
        return self._next(scored.group_id, self._gather.ledger.step())

    def forget(self, item: str) -> None:
        """Nothing: what is remembered is bounded by the ledger."""

    def _hold(self, rollout: Rollout) -> None:
        """Score a rollout, if it is wanted and not scored already."""
        digest, group_id = rollout.digest, rollout.group_id
        if digest in self._scored or not self._gather.holds(group_id, digest):
            return
        scored = _Scored(
            rollout.rollout_id, group_id, rollout.closed_at_ms, rollout.status is not RolloutStatus.ABORTED
        )
        self._scored[digest] = scored
        for scoring in self._scorings if group_id in self._written else ():
            known = self._written[group_id].get(scoring.empty(rollout.rollout_id, digest).score_id)
            if known is not None:
                scored.scores[scoring.spec.name] = known
        if self._is_wanted(digest, scored):
            self._begin(digest, scored)

    def _expect(self, decision: Decision) -> None:
        """Note which scores a decision waits for."""
        decision.unscored = set()
        for digest in decision.members:
            scored = self._scored.get(digest)
            if scored is None:
                decision.unscored.add(digest)
                continue
            if not self._has_all(scored):
                decision.unscored.add(digest)
            self._begin(digest, scored)

    def _begin(self, digest: str, scored: _Scored) -> None:
        if scored.has_begun:
            return
        scored.has_begun = True
        if self._has_all(scored):
            for decision in self._gather.decisions(scored.group_id):
                decision.unscored.discard(digest)
            return
        heapq.heappush(self._unscored, (scored.closed_at_ms, digest))
        self._waiting.extend((digest, one) for one in self._scorings if one.spec.name not in scored.scores)

    def _is_pending(self, digest: str) -> bool:
        scored = self._scored.get(digest)
        return scored is not None and scored.has_begun and not self._has_all(scored)

    def _has_all(self, scored: _Scored) -> bool:
        return not scored.is_scored or len(scored.scores) == len(self._scorings)

    def _is_wanted(self, digest: str, scored: _Scored) -> bool:
        """Whether anybody may ask for a rollout's scores: not while it is only kept for a revision that may never come."""
        if not self._gather.is_made(scored.group_id):
            return True
        return any(digest in decision.members for decision in self._gather.decisions(scored.group_id))

    def _next(self, group_id: str, step: Step) -> Step:
        """Emit what is ready of a group, and start what there is room for."""
        ready = [one for one in self._gather.decisions(group_id) if not one.missing and not one.unscored]
        emits = tuple(self._emit(decision) for decision in ready)
        work = []
        while self._waiting and len(self._running) < self._max_concurrency:
            digest, scoring = self._waiting.popleft()
            scored = self._scored.get(digest)
            if scored is None or scoring.spec.name in scored.scores:
                continue
            if not self._is_wanted(digest, scored):
                scored.has_begun = False
                continue
            one = _work(self._gather.event(scored.group_id, digest), scoring, scored.rollout_id, digest)
            if one.key not in self._running:
                self._running.add(one.key)
                work.append(one)
        return replace(step, emits=emits, work=tuple(work)) if emits or work else step

    def _emit(self, decision: Decision) -> Emit:
        scores = tuple(
            self._scored[member.rollout_digest].scores[scoring.spec.name]
            for member in decision.group.members
            if member.status is not RolloutStatus.ABORTED
            for scoring in self._scorings
        )
        record = self._record(decision.group, scores)
        return Emit(decision.item, (record,), self._gather.close(decision))

    def _record(self, group: Group, scores: tuple[Score, ...]) -> GroupScores:
        timeless = with_digest(
            GroupScores(
                group=group,
                scores=tuple(replace(score, latency_ms=0) for score in scores),
                digest="",
                stage=self._signature.stage,
                pipeline=self._signature.pipeline,
                pipeline_digest=self._signature.pipeline_digest,
            )
        )
        return replace(timeless, scores=scores)


def _work(event: Event, scoring: _Scoring, rollout_id: str, digest: str) -> Work:
    async def run() -> object:
        rollout = event.record
        if not isinstance(rollout, Rollout):
            raise StageError(f"score cannot use a {type(rollout).__name__}, expected a Rollout")
        said = await run_scorer(scoring.scorer, rollout, scoring.spec.timeout_s)
        empty = scoring.empty(rollout_id, digest)
        return replace(empty, value=said.value, verdict=said.verdict, error=said.error, latency_ms=said.latency_ms)

    return Work(f"{digest}/{scoring.spec.name}", run)
