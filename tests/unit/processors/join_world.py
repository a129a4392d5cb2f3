"""Join in a small world that fails: one partition's logs, commits that lag behind, acknowledgements that are lost, restarts.

It does what the shell does, as plainly as can be: offsets are committed in order, up to the first event that is held. A rollout
stays to be read back until the watermarks have passed what it was made of; only then is the stage told to forget it. Nothing
leaves before the own output has been read to the end that it had at the start.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from rollstream.processors.base import Emit, Event, Position, Reject, Step
from rollstream.processors.join import JoinStage
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.records import Record, Rollout
from tests.unit.processors.joining import PIPELINE

CODEC = Codec()
TOPICS = ("calls", "environment", "terminals")


@dataclass(frozen=True)
class Written:
    """A record of the own output."""

    value: bytes
    used: dict[str, int]


class JoinWorld:
    """A join stage and everything around it. Every choice is the seed's."""

    def __init__(self, entries: Iterable[tuple[str, Record]], seed: int, kept_items: int) -> None:
        self.rng = random.Random(seed)
        self.logs: dict[str, list[bytes]] = {noun: [] for noun in TOPICS}
        for noun, record in entries:
            self.logs[noun].append(CODEC.encode(record))
        self.own: list[Written] = []
        self.dead: dict[Position, set[str]] = {}
        self.committed = dict.fromkeys((*TOPICS, "rollouts"), 0)
        self.kept_items = kept_items
        self.start()

    def start(self) -> None:
        """A new stage, which reads again from what was committed."""
        stage = PIPELINE.build_stages(0)[0]
        assert isinstance(stage, JoinStage)
        stage.kept_items = self.kept_items
        self.stage = stage
        self.cursors = dict(self.committed)
        self.gate = len(self.own)
        self.held: dict[str, set[int]] = {noun: set() for noun in self.cursors}
        self.kept_emits: dict[str, Emit] = {}
        self.kept_rejects: dict[Position, Reject] = {}
        self.acks: list[Emit] = []
        self.items: dict[int, str] = {}

    def rollouts(self) -> list[Rollout]:
        """What was written, copies among them."""
        return [r for written in self.own if isinstance(r := CODEC.decode(written.value), Rollout)]

    def run(self, restarts: int) -> None:
        """Read everything, with so many restarts at any moment; then let time pass until nothing is open."""
        records = sum(map(len, self.logs.values()))
        moments = {self.rng.randrange(3 * records) for _ in range(restarts)}
        moment = 0
        while self._step():
            moment += 1
            assert moment < 20 * (records + 10), "the stage keeps writing"
            if moment in moments:
                self.start()
        for now_ms in (2 << 40, (2 << 40) + 30_000, (2 << 40) + 60_000):
            self._do(self.stage.tick(now_ms))
            while self._step():
                pass

    def _step(self) -> bool:
        choices = [noun for noun in TOPICS if self.cursors[noun] < len(self.logs[noun])]
        if self.cursors["rollouts"] < len(self.own):
            choices += ["rollouts"]
        if self.acks:
            choices += ["ack"]
        if not choices:
            return False
        if self.rng.random() < 0.2:
            self.committed = {noun: self._watermark(noun) for noun in self.cursors}
        what = self.rng.choice(choices)
        if what == "ack":
            self._release(self.stage.item_done(self.acks.pop(0).item))
        elif what == "rollouts":
            self._read_own()
        else:
            event = self._event(what, self.logs[what][self.cursors[what]])
            self._do(self.stage.apply(event))
            event.thin()
        return True

    def _read_own(self) -> None:
        event = self._event("rollouts", self.own[self.cursors["rollouts"]].value)
        item = self.stage.own_output(event)
        assert item is not None
        self.items[event.position.offset] = item
        self.kept_emits.pop(item, None)
        self._release(self.stage.item_done(item))
        if self._is_open():
            emits, rejects = tuple(self.kept_emits.values()), tuple(self.kept_rejects.values())
            self.kept_emits, self.kept_rejects = {}, {}
            self._do(Step(emits, rejects))

    def _event(self, noun: str, value: bytes) -> Event:
        position = Position(noun, 0, self.cursors[noun])
        self.cursors[noun] += 1
        self.held[noun].add(position.offset)
        parsed = CODEC.parse(value)
        return Event(position, parsed, event_time_ms(parsed), value, None, CODEC.decode)

    def _do(self, step: Step) -> None:
        self._release(step.finished)
        for emit in step.emits:
            if self._is_open():
                used = {
                    noun: max(p.offset for p in emit.used if p.noun == noun) for noun in {p.noun for p in emit.used}
                }
                self.own += [Written(CODEC.encode(record), used) for record in emit.records]
                self.acks.append(emit)
            else:
                self.kept_emits[emit.item] = emit
        for reject in step.rejects:
            position = reject.event.position
            if self._is_open():
                self.dead.setdefault(position, set()).add(reject.reason)
                self._release([position])
            else:
                self.kept_rejects[position] = reject

    def _is_open(self) -> bool:
        return self.cursors["rollouts"] >= self.gate

    def _release(self, positions: Iterable[Position]) -> None:
        for position in positions:
            self.held[position.noun].discard(position.offset)
            self.kept_rejects.pop(position, None)
        for offset in sorted(self.held["rollouts"] & self.items.keys()):
            if all(self._watermark(noun) > used for noun, used in self.own[offset].used.items()):
                self.held["rollouts"].remove(offset)
                self.stage.forget(self.items[offset])

    def _watermark(self, noun: str) -> int:
        return min(self.held[noun], default=self.cursors[noun])
