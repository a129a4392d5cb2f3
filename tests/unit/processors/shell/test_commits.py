"""No commit passes an event whose derived records are not acknowledged: in any order of reads, sends, acks and deaths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.processors.shell.messages import Outgoing
from rollstream.schemas.records import DeadLetter, EnvironmentEvent, Group, Record, Rollout
from tests.unit.processors.shell.log import CODEC, Log, Message
from tests.unit.processors.shell.stages import Gather, Join, ended, observed, opened

ROLLOUTS = 8
REMEMBERED_MS = 500


def _input(chance: random.Random) -> Iterator[tuple[str, Record]]:
    """Rollouts, two a group, with some poison, interleaved; each rollout's own records stay in order."""
    waiting = [list(_rollout(number, chance)) for number in range(ROLLOUTS)]
    while waiting:
        records = chance.choice(waiting[:3])
        yield records.pop(0)
        if not records:
            waiting.remove(records)


def _rollout(number: int, chance: random.Random) -> Iterator[tuple[str, Record]]:
    name, group = f"r{number}", f"g{number // 2}"
    yield "calls", opened(name, group=group)
    for event in range(chance.randrange(3)):
        yield "environment", observed(name, "poison" if chance.random() < 0.2 else f"{event}", group=group)
    for noun in ("calls", "environment", "terminals"):
        yield noun, ended(name, group=group)


class _World:
    """A worker between a log and a broker that takes, acknowledges and loses its messages as chance has it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.log = Log(lambda: [Join(), Gather(remembers_ms=REMEMBERED_MS)])
        for noun, record in _input(chance):
            self.log.write(noun, record)
        self.acknowledged: set[str] = set()
        self.air: list[Outgoing] = []
        self.taken: list[tuple[Outgoing, int]] = []
        self.start()

    def start(self) -> None:
        """The worker dies, if it ran, and starts. Of what was in the air the broker has taken some."""
        for outgoing in self.air:
            if self.chance.random() < 0.5:
                self.log.take(outgoing)
        self.air, self.taken = [], []
        self.log.start()

    def step(self) -> None:
        """Something happens."""
        log = self.log
        what = self.chance.choices(
            ("read", "send", "take", "ack", "commit", "tick", "die"), (8, 4, 4, 4, 2, 1, 0.15)
        )[0]
        if what == "read":
            noun = self.chance.choice(log.partition.nouns)
            log.read(noun, min(log.position[noun] + self.chance.randrange(1, 5), len(log.topics[noun])))
        elif what == "send":
            self.air.extend(log.partition.outbox)
            log.partition.outbox.clear()
        elif what == "take" and self.air:
            outgoing = self.air.pop(self.chance.randrange(len(self.air)))
            self.taken.append((outgoing, log.take(outgoing)))
        elif what == "ack" and self.taken:
            outgoing, offset = self.taken.pop(self.chance.randrange(len(self.taken)))
            self.acknowledged.add(_identity(outgoing.record))
            outgoing.on_ack(outgoing, offset)
        elif what == "commit":
            log.commit()
        elif what == "tick":
            log.now_ms += self.chance.randrange(REMEMBERED_MS)
            log.partition.tick()
        elif what == "die":
            self.start()

    def finish(self) -> None:
        """Nothing goes wrong any more."""
        self.start()
        for _ in range(3):
            self.log.read_all()
            self.log.now_ms += 10 * REMEMBERED_MS
            for noun in self.log.partition.nouns:
                self.log.read(noun)
            self.log.partition.tick()
        self.log.commit()

    def passed_unacknowledged(self) -> list[str]:
        """What is derived of committed events and neither acknowledged nor seen in the log by the worker."""
        self.acknowledged |= {
            _identity(_record(message))
            for noun in ("rollouts", "groups")
            for message in self.log.topics[noun][: self.log.position[noun]]
        }
        committed = [
            (noun, message)
            for noun, mark in self.log.partition.watermarks().items()
            for message in self.log.topics[noun][:mark]
            if noun != "groups"
        ]
        return [
            derived for noun, message in committed if (derived := _derived(noun, message)) not in self.acknowledged
        ]


def _identity(record: Record) -> str:
    if isinstance(record, Rollout):
        return f"rollout {record.rollout_id}"
    if isinstance(record, Group):
        return f"group {record.group_id}"
    assert isinstance(record, DeadLetter)
    return f"dead letter {record.topic}@{record.offset}"


@cache
def _record(message: Message) -> Record:
    return CODEC.decode(message.value or b"")


def _derived(noun: str, message: Message) -> str:
    record = _record(message)
    if isinstance(record, Rollout):
        return f"group {record.group_id}"
    if isinstance(record, EnvironmentEvent) and "poison" in record.content:
        return f"dead letter t.{noun}.v1@{message.offset}"
    return f"rollout {record.rollout_id}"


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_watermarks_never_pass_what_is_not_acknowledged_and_reach_the_end(seed: int) -> None:
    """Acks in any order, reads in any order, deaths at any time: nothing is committed early, and in the end everything is."""
    world = _World(random.Random(seed))

    for _ in range(300):
        world.step()
        assert [] == world.passed_unacknowledged()
    world.finish()

    assert {noun: len(world.log.topics[noun]) for noun in world.log.partition.nouns} == world.log.committed
    rollouts = {CODEC.decode(value or b"").rollout_id: value for value in world.log.values("rollouts")}  # type: ignore[attr-defined]
    assert ROLLOUTS == len(rollouts) == len(set(world.log.values("rollouts")))
    assert ROLLOUTS // 2 == len(set(world.log.values("groups")))
