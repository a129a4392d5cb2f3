"""The real stages under the real shell's partition, without a broker: everything is written and let go of."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from rollstream.processors.shell.admission import Admission, kinds_by_topic
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.partition import Partition
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import Message, to_message
from rollstream.schemas.records import GroupBuilt
from tests.source_log import source_log
from tests.unit.processors.simulation import default_pipeline


@dataclass(frozen=True)
class Logged:
    """A message as a consumer sees it."""

    offset: int
    key: bytes
    value: bytes
    timestamp: int
    headers: tuple[tuple[str, bytes], ...]


async def test_partition_drives_all_stages_to_the_end_of_the_log() -> None:
    """Source topics in, one marker a group out, and every topic's watermark at its end."""
    codec, logs = Codec(), _sources(groups=4, size=3, seed=1)

    partition = await _drive(logs)

    samples = [codec.decode(message.value) for message in logs["samples"]]
    assert 4 == sum(isinstance(record, GroupBuilt) for record in samples)
    assert {noun: len(log) for noun, log in logs.items()} == partition.watermarks()
    assert {0} == set(partition.held.values())


def _append(logs: dict[str, list[Logged]], noun: str, message: Message) -> int:
    log = logs.setdefault(noun, [])
    log.append(Logged(len(log), message.key, message.value, message.timestamp_ms, message.headers))
    return len(log) - 1


async def _drive(logs: dict[str, list[Logged]], *, admission: Admission | None = None) -> Partition:
    """Run all stages until nothing moves."""
    codec = Codec()
    partition = Partition(
        0, default_pipeline().build_stages(0), codec, guard=DeadLetterGuard(1.0), admission=admission
    )
    partition.begin(dict.fromkeys(partition.nouns, 0), dict.fromkeys(partition.own_outputs, 0))
    read, now_ms = dict.fromkeys(partition.nouns, 0), 10
    is_busy, idle = True, 0
    while is_busy or idle < 5:
        is_busy = False
        for noun in partition.nouns:
            batch = logs.get(noun, [])[read[noun] :]
            partition.feed(noun, batch)
            read[noun] += len(batch)
            partition.passed(noun, read[noun], now_ms)
            is_busy |= bool(batch)
        while partition.work:
            running = partition.work.popleft()
            partition.work_done(running, await running.work.run())
        while partition.outbox:
            sent = partition.outbox.popleft()
            sent.on_ack(sent, _append(logs, sent.message.topic.split(".")[1], sent.message))
            is_busy = True
        partition.tick()
        idle = 0 if is_busy else idle + 1
        now_ms = 10 if idle == 0 else now_ms + 10**13  # beyond every deadline, so that what lacks its other half ends
    return partition


def _sources(*, groups: int, size: int, seed: int) -> dict[str, list[Logged]]:
    codec = Codec()
    logs: dict[str, list[Logged]] = {}
    for noun, record in source_log(groups=groups, size=size, seed=seed):
        _append(logs, noun, to_message(record, codec, prefix="rollstream", source="/test", noun=noun))
    return logs


def _broken(value: bytes, chance: random.Random) -> bytes | None:
    """Bytes that went wrong on their way."""
    how = chance.randrange(6)
    if how == 0:
        return None
    if how == 1:
        return value[: chance.randrange(len(value))]
    if how == 2:
        return value + value[:5]
    broken = bytearray(value)
    for _ in range(chance.choice((1, 1, 3, 20))):
        broken[chance.randrange(10 if how == 3 else 0, len(value))] = chance.randrange(256)
    return bytes(broken)


@pytest.mark.parametrize("seed", range(6))
async def test_poison_in_any_topic_stops_nothing(seed: int) -> None:
    """Broken bytes, tombstones and records of other topics: whatever they decode to, every event is let go of in the end."""
    chance = random.Random(seed)
    logs = _sources(groups=2, size=2, seed=3)
    await _drive(logs)
    nouns = [noun for noun in logs if noun != "dead-letters"]
    values = {noun: [message.value for message in logs[noun]] for noun in nouns}
    poisoned: dict[str, list[Logged]] = {}
    for noun in nouns:
        for value in values[noun]:
            for what in (_broken(value, chance), value, chance.choice(values[chance.choice(nouns)])):
                log = poisoned.setdefault(noun, [])
                log.append(Logged(len(log), b"k", what, 5, ()))  # type: ignore[arg-type]

    partition = await _drive(poisoned, admission=Admission(kinds=kinds_by_topic()))

    assert {noun: len(poisoned[noun]) for noun in partition.nouns} == partition.watermarks()
    assert len(poisoned["dead-letters"]) > sum(len(values[noun]) for noun in nouns) / 2
