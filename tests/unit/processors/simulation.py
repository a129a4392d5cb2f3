"""The stages chained in memory, as the shell would run them: logs, offsets, held events, acknowledgements, restarts.

Everything that the real world leaves open is drawn from a seed: which topic is read next, by which stage, when an output is
acknowledged, when a scorer answers, and when all stages are thrown away and start again from what was committed.
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
    """A record at a place in a topic."""
    return Event(Position(noun, 0, offset), record, event_time_ms(record), CODEC.encode(record))


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
    held: dict[str, set[int]] = field(default_factory=dict)
    kept: dict[str, Emit] = field(default_factory=dict)
    kept_rejects: dict[Position, Reject] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.own_cursor >= self.gate


class Simulation:
    """One partition of a pipeline."""

    def __init__(self, pipeline: Pipeline, seed: int = 0, names: Iterable[str] | None = None) -> None:
        self.pipeline = pipeline
        self.names = None if names is None else set(names)
        self.rng = random.Random(seed)
        self.logs: dict[str, list[Event]] = {}
        self.dead: dict[Position, Reject] = {}
        self.acks: list[tuple[Hosted, Emit]] = []
        self.works: list[tuple[Hosted, Work]] = []
        self.hosted: list[Hosted] = []
        self.start()

    def start(self) -> None:
        """New stages; what was held before is read again."""
        committed = {noun: self.watermark(noun) for noun in self.logs}
        self.acks, self.works = [], []
        stages = [s for s in self.pipeline.build_stages(0) if self.names is None or s.name in self.names]
        self.hosted = [Hosted(stage, {noun: committed.get(noun, 0) for noun in stage.inputs}) for stage in stages]
        for hosted in self.hosted:
            if hosted.stage.reads_own_output:
                hosted.gate = len(self.logs.get(hosted.stage.output, []))

    def watermark(self, noun: str) -> int:
        """First offset of a topic that a stage holds or has not read."""
        marks = [
            min([hosted.cursors[noun], *hosted.held.get(noun, ())])
            for hosted in self.hosted
            if noun in hosted.cursors
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
                self._release(hosted, reject.event.position)
            else:
                hosted.kept_rejects[reject.event.position] = reject
        self.works += [(hosted, work) for work in step.work]

    def _read(self, hosted: Hosted, noun: str) -> None:
        event = self.logs[noun][hosted.cursors[noun]]
        hosted.cursors[noun] += 1
        hosted.held.setdefault(noun, set()).add(event.position.offset)
        self.do(hosted, hosted.stage.apply(event))

    def _read_own(self, hosted: Hosted) -> None:
        event = self.logs[hosted.stage.output][hosted.own_cursor]
        item = hosted.stage.own_output(event)
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
        for record in emit.records:
            self.append(hosted.stage.output, record)
        self.acks.append((hosted, emit))

    def _done(self, hosted: Hosted, emit: Emit) -> None:
        for position in hosted.stage.item_done(emit.item):
            self._release(hosted, position)

    def _release(self, hosted: Hosted, position: Position) -> None:
        hosted.held[position.noun].discard(position.offset)
        hosted.kept_rejects.pop(position, None)


async def _result(work: Work) -> object:
    return await work.run()
