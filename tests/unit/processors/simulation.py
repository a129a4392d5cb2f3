"""The stages chained in memory, as the shell would run them: logs, offsets, held events, acknowledgements, restarts.

Everything that the real world leaves open is drawn from a seed: which topic is read next, by which stage, when an output is
acknowledged, when a scorer answers, and when all stages are thrown away and start again from what was committed.

With `forgets`, a stage's own output is committed as the shell commits it: once what it was made from is. A restart reads nothing
before that but what a stage remembers, and gives that to no other stage. Otherwise it reads all that the stages ever wrote.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.processors.base import Emit, Event, Position, Reject, Stage, Step, Work
from rollstream.processors.pipeline import Pipeline, load_pipeline
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.records import Record

DEFAULT = Path(__file__).parents[3] / "pipelines" / "default.yaml"
CODEC = Codec()


def an_event(record: Record, noun: str, offset: int) -> Event:
    """A record at a place in a topic, as the shell reads it."""
    value = CODEC.encode(record)
    return Event(Position(noun, 0, offset), CODEC.parse(value), event_time_ms(record), value, None, CODEC.decode)


def default_pipeline() -> Pipeline:
    """The pipeline that ships."""
    return load_pipeline(DEFAULT)


@dataclass
class Hosted:
    """A stage and what the shell knows about it."""

    stage: Stage
    cursors: dict[str, int]
    own_cursor: int = 0
    gate: int = 0
    finished: int = 0
    """Where its own output was committed when it started; what is read before that is for its memory alone."""
    own_held: dict[int, str | None] = field(default_factory=dict)
    """Own outputs that are not let go of, by offset, with the items that they finish."""
    remembered: dict[int, str] = field(default_factory=dict)
    """Own outputs that are let go of, and that the stage remembers."""
    held: dict[str, set[int]] = field(default_factory=dict)
    kept: dict[str, Emit] = field(default_factory=dict)
    kept_rejects: dict[Position, Reject] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.own_cursor >= self.gate


class Simulation:
    """One partition of a pipeline."""

    def __init__(
        self, pipeline: Pipeline, seed: int = 0, names: Iterable[str] | None = None, *, forgets: bool = False
    ) -> None:
        self.pipeline = pipeline
        self.names = None if names is None else set(names)
        self.forgets = forgets
        self.rng = random.Random(seed)
        self.logs: dict[str, list[Event]] = {}
        self.dead: dict[Position, Reject] = {}
        self.letters: list[Reject] = []
        """All dead letters, where several stages reject one event, or one stage does twice."""
        self.used: dict[tuple[str, int], dict[str, int]] = {}
        """What an output was made from, by its topic and offset: the highest offset in each input."""
        self.committed: dict[str, int] = {}
        self.memory: dict[str, int] = {}
        """Where the oldest own output that a stage remembers stands, by topic."""
        self.acks: list[tuple[Hosted, Emit]] = []
        self.works: list[tuple[Hosted, Work]] = []
        self.hosted: list[Hosted] = []
        self.start()

    def commit(self) -> None:
        """Commit what every topic allows now."""
        self._let_go_of_own(None)
        self.committed = {noun: self.watermark(noun) for noun in self.logs}
        self.memory = {hosted.stage.output: min(hosted.remembered) for hosted in self.hosted if hosted.remembered}

    def start(self, *, is_late: bool = False) -> None:
        """New stages; what was held before is read again. Args: is_late: the last moments before were not committed."""
        if not is_late:
            self.commit()
        committed = self.committed
        self.acks, self.works = [], []
        stages = [s for s in self.pipeline.build_stages(0) if self.names is None or s.name in self.names]
        self.hosted = [Hosted(stage, {noun: committed.get(noun, 0) for noun in stage.inputs}) for stage in stages]
        for hosted in self.hosted:
            if hosted.stage.reads_own_output:
                noun = hosted.stage.output
                hosted.finished = committed.get(noun, 0)
                remembered = min(hosted.finished, self.memory.get(noun, hosted.finished))
                hosted.own_cursor = remembered if self.forgets else 0
                hosted.gate = len(self.logs.get(noun, []))

    def watermark(self, noun: str) -> int:
        """First offset of a topic that a stage holds or has not read."""
        marks = [
            min([hosted.cursors[noun], *hosted.held.get(noun, ())])
            for hosted in self.hosted
            if noun in hosted.cursors
        ]
        marks += [
            min([hosted.own_cursor, *hosted.own_held])
            for hosted in self.hosted
            if self.forgets and hosted.stage.reads_own_output and hosted.stage.output == noun
        ]
        return min(marks, default=0)

    def append(self, noun: str, record: Record) -> None:
        """Write a record to the end of a topic."""
        log = self.logs.setdefault(noun, [])
        log.append(an_event(record, noun, len(log)))

    def records(self, noun: str) -> list[Record]:
        """Everything in a topic."""
        return [event.record for event in self.logs.get(noun, [])]

    def run(self) -> None:
        """Go on, in any order, until there is nothing left to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """Do one thing that may happen next. Returns: False if there is none."""
        choices: list[tuple[str, object, str]] = []
        for hosted in self.hosted:
            choices += [("read", hosted, n) for n, at in hosted.cursors.items() if at < len(self.logs.get(n, ()))]
            if hosted.stage.reads_own_output and hosted.own_cursor < len(self.logs.get(hosted.stage.output, ())):
                choices.append(("own", hosted, ""))
        if self.acks:
            choices.append(("ack", None, ""))
        if self.works:
            choices.append(("work", None, ""))
        if not choices:
            return False
        what, hosted, noun = self.rng.choice(choices)
        if what == "read":
            self._read(hosted, noun)  # type: ignore[arg-type]
        elif what == "own":
            self._read_own(hosted)  # type: ignore[arg-type]
        elif what == "ack":
            self._done(*self.acks.pop(0))
        else:
            owner, work = self.works.pop(self.rng.randrange(len(self.works)))
            self.do(owner, owner.stage.work_done(work.key, asyncio.run(_result(work))))
        return True

    def tick(self, now_ms: int) -> None:
        """Let time pass while everything is read."""
        for hosted in self.hosted:
            self.do(hosted, hosted.stage.tick(now_ms))
            self.run()
        self._let_go_of_own(now_ms)

    def held(self) -> dict[str, dict[str, set[int]]]:
        """What each stage still holds."""
        return {h.stage.name: {n: at for n, at in h.held.items() if at} for h in self.hosted if any(h.held.values())}

    def do(self, hosted: Hosted, step: Step) -> None:
        """Do what a stage asks for."""
        for position in step.finished:
            self._release(hosted, position)
        for emit in step.emits:
            self._emit(hosted, emit)
        for reject in step.rejects:
            if hosted.is_open:
                self.dead[reject.event.position] = reject
                self.letters.append(reject)
                self._release(hosted, reject.event.position)
            else:
                hosted.kept_rejects[reject.event.position] = reject
        self.works += [(hosted, work) for work in step.work]

    def _read(self, hosted: Hosted, noun: str) -> None:
        event = self.logs[noun][hosted.cursors[noun]]
        hosted.cursors[noun] += 1
        hosted.held.setdefault(noun, set()).add(event.position.offset)
        self.do(hosted, hosted.stage.apply(event))
        event.thin()

    def _read_own(self, hosted: Hosted) -> None:
        event = self.logs[hosted.stage.output][hosted.own_cursor]
        item = hosted.stage.own_output(event)
        event.thin()
        if hosted.own_cursor >= hosted.finished:
            hosted.own_held[hosted.own_cursor] = item
        elif item is not None and hosted.stage.remembers_ms:
            hosted.remembered[hosted.own_cursor] = item
        hosted.own_cursor += 1
        if item is not None:
            hosted.kept.pop(item, None)
            for position in hosted.stage.item_done(item):
                self._release(hosted, position)
        if hosted.is_open:
            kept, hosted.kept = hosted.kept, {}
            rejects, hosted.kept_rejects = hosted.kept_rejects, {}
            self.do(hosted, Step(tuple(kept.values()), tuple(rejects.values())))

    def _emit(self, hosted: Hosted, emit: Emit) -> None:
        if not hosted.is_open:
            hosted.kept[emit.item] = emit
            return
        used: dict[str, int] = {}
        for position in emit.used:
            used[position.noun] = max(position.offset, used.get(position.noun, 0))
        for record in emit.records:
            self.used[hosted.stage.output, len(self.logs.get(hosted.stage.output, ()))] = used
            self.append(hosted.stage.output, record)
        self.acks.append((hosted, emit))

    def _done(self, hosted: Hosted, emit: Emit) -> None:
        for position in hosted.stage.item_done(emit.item):
            self._release(hosted, position)

    def _let_go_of_own(self, now_ms: int | None) -> None:
        """Let go of own outputs whose inputs are passed, and which nobody remembers. Args: now_ms: None forgets nothing."""
        if not self.forgets:
            return
        for hosted in self.hosted:
            stage = hosted.stage
            for offset, item in sorted(hosted.own_held.items()):
                used = self.used.get((stage.output, offset), {})
                if all(self.watermark(noun) > at for noun, at in used.items() if noun in hosted.cursors):
                    del hosted.own_held[offset]
                    if item is not None and stage.remembers_ms:
                        hosted.remembered[offset] = item
            held = [self.logs[noun][min(at)].time_ms for noun, at in hosted.held.items() if at]
            oldest_ms = 0 if now_ms is None else min([now_ms, *held])
            for offset, item in list(hosted.remembered.items()):
                if oldest_ms - self.logs[stage.output][offset].time_ms >= stage.remembers_ms:
                    del hosted.remembered[offset]
                    stage.forget(item)

    def _release(self, hosted: Hosted, position: Position) -> None:
        hosted.held[position.noun].discard(position.offset)
        hosted.kept_rejects.pop(position, None)


async def _result(work: Work) -> object:
    return await work.run()
