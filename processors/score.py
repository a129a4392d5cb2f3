"""Score: every scorer's raw verdict on every rollout of a group, written once the group is closed.

Scorers start as soon as a rollout is in, before its group is closed. A partition asks for at most `max_concurrency` at
once, the others wait their turn in the order of arrival; the shell runs no more than that in a process. They run outside the
stage (`Work`), each with its own time limit, so one that never returns costs one place for that long and blocks nothing
else. A scorer that fails gives a score without a value and with an error; a missing score is never 0. Rollouts that ended as
`aborted` are not scored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from rollstream.processors.base import Emit, Event, Position, Step, Work
from rollstream.processors.config import ScoreConfig, ScorerConfig, Signature
from rollstream.processors.gather import Gather, group_of, marks_of_decision
from rollstream.processors.scorers.base import Scorer, run_scorer
from rollstream.schemas.codec import with_digest
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import Group, GroupScores, Rollout, RolloutStatus, Score


class ScoreStage:
    """Score, for one partition."""

    name = "score"
    inputs: tuple[str, ...] = ("rollouts", "groups")
    output = "scores"
    reads_own_output = True
    remembers_ms = 0

    def __init__(
        self, config: ScoreConfig, signature: Signature, scorers: Sequence[tuple[ScorerConfig, Scorer]]
    ) -> None:
        """Args: scorers: in the order in which their scores are written."""
        self._signature = signature
        self._max_concurrency = config.max_concurrency
        self._scorers = [(spec, digest_json(spec.config), scorer) for spec, scorer in scorers]
        self._gather = Gather(self.name)
        self._scores: dict[str, dict[str, Score]] = {}
        """By rollout digest, then by scorer."""
        self._items: dict[str, str] = {}
        """The item of a rollout, by its digest."""
        self._digests: dict[str, set[str]] = {}
        """The rollouts that are scored or being scored for an item, by digest."""
        self._waiting: deque[tuple[str, Work]] = deque()
        self._running: set[str] = set()

    def apply(self, event: Event) -> Step:
        item, step = self._gather.take(event)
        rollout = event.record
        if isinstance(rollout, Rollout) and self._gather.wants(item, rollout.digest):
            self._begin(item, rollout)
        else:
            self._forget_unwanted(item)
        return self._next(item, step)

    def tick(self, now_ms: int) -> Step:
        return self._gather.ledger.step()

    def own_output(self, event: Event) -> str | None:
        record = event.record
        if not isinstance(record, GroupScores):
            return None
        group = record.group
        item = f"{group.group_id}/{group.revision}"
        self._gather.ledger.read_back(item, lambda: marks_of_decision(group.digest))
        return item

    def item_done(self, item: str) -> tuple[Position, ...]:
        positions = self._gather.done(item)
        self._forget_unwanted(item)
        return positions

    def work_done(self, key: str, result: object) -> Step:
        self._running.discard(key)
        digest, _, scorer = key.partition("/")
        item = self._items.get(digest, "")
        if isinstance(result, Score) and digest in self._scores:
            self._scores[digest][scorer] = result
        return self._next(item, self._gather.ledger.step())

    def forget(self, item: str) -> None:
        """Nothing: what is remembered is bounded by the ledger."""

    def _begin(self, item: str, rollout: Rollout) -> None:
        if rollout.digest in self._scores:
            return
        self._scores[rollout.digest] = {}
        self._items[rollout.digest] = item
        self._digests.setdefault(item, set()).add(rollout.digest)
        if rollout.status is RolloutStatus.ABORTED:
            return
        for spec, config_digest, scorer in self._scorers:
            work = _work(rollout, spec, config_digest, scorer)
            self._waiting.append((rollout.digest, work))

    def _next(self, item: str, step: Step) -> Step:
        """Emit the item if it is ready, and start what there is room for."""
        emits = self._emit(item)
        work = []
        while self._waiting and len(self._running) < self._max_concurrency:
            digest, one = self._waiting.popleft()
            if digest in self._scores:
                self._running.add(one.key)
                work.append(one)
        return replace(step, emits=emits, work=tuple(work)) if emits or work else step

    def _emit(self, item: str) -> tuple[Emit, ...]:
        gathered = self._gather.complete(item)
        if gathered is None or gathered.decision is None:
            return ()
        group = group_of(gathered.decision.record)
        scores = []
        for member in group.members:
            is_scored = member.status is not RolloutStatus.ABORTED
            found = self._scores[member.rollout_digest]
            if is_scored and len(found) < len(self._scorers):
                return ()
            scores += [found[spec.name] for spec, _, _ in self._scorers if is_scored]
        record = self._record(group, tuple(scores))
        used = self._gather.close(item)
        self._forget_unwanted(item)
        return (Emit(item, (record,), used),)

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

    def _forget_unwanted(self, item: str) -> None:
        """Let go of the scores, and of the turns, of rollouts of an item that are not held any more."""
        digests = self._digests.get(item, set())
        for digest in [digest for digest in digests if not self._gather.wants(item, digest)]:
            digests.discard(digest)
            del self._scores[digest], self._items[digest]
        if not digests:
            self._digests.pop(item, None)


def _work(rollout: Rollout, spec: ScorerConfig, config_digest: str, scorer: Scorer) -> Work:
    empty = Score(
        score_id=digest_json("score", rollout.digest, spec.name, spec.kind, spec.version, config_digest),
        rollout_id=rollout.rollout_id,
        scorer=spec.name,
        kind=spec.kind,
        version=spec.version,
        config_digest=config_digest,
    )

    async def run() -> object:
        said = await run_scorer(scorer, rollout, spec.timeout_s)
        return replace(empty, value=said.value, verdict=said.verdict, error=said.error, latency_ms=said.latency_ms)

    return Work(f"{rollout.digest}/{spec.name}", run)
